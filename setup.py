"""Makes ``dmsg/rmb/envelope/envelope_pb2.py`` of ``envelope.proto`` when dmsg is built; all else is in setup.cfg."""

from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

PROTO = Path("dmsg/rmb/envelope/envelope.proto")
OUTPUTS = ("envelope_pb2.py", "envelope_pb2.pyi")


class BuildProto(Command):
    """The step of ``build`` that runs protoc; see setuptools' SubCommand."""

    editable_mode = False
    build_lib = None

    def initialize_options(self):
        """Nothing to set."""

    def finalize_options(self):
        """Where the rest of the build goes."""
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        """Compile; the result lies beside the source, where an editable install has it."""
        from grpc_tools import protoc

        arguments = ["protoc", "--proto_path=.", "--python_out=.", "--pyi_out=.", str(PROTO)]
        if protoc.main(arguments):
            raise SystemExit(f"{PROTO}: protoc failed")
        if not self.editable_mode:
            for output in self.get_outputs():
                target = Path(output)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((PROTO.parent / target.name).read_bytes())

    def get_outputs(self):
        """In the build."""
        return [str(Path(self.build_lib) / PROTO.parent / name) for name in OUTPUTS]

    def get_output_mapping(self):
        """Built -> source."""
        return {output: str(PROTO.parent / Path(output).name) for output in self.get_outputs()}

    def get_source_files(self):
        """For the source distribution."""
        return [str(PROTO)]


build.sub_commands = [("build_proto", None), *build.sub_commands]
setup(cmdclass={"build_proto": BuildProto})
