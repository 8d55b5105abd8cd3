"""Parts of the build that setup.cfg cannot describe: the long description, and ``envelope_pb2.py``, which is made of
``envelope.proto``.
"""

import re
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build

PROTO = Path("dmsg/rmb/envelope/envelope.proto")
OUTPUTS = ("envelope_pb2.py", "envelope_pb2.pyi")


def long_description(text):
    """README without pictures, and with the text of links alone where they lead to files beside it.

    An index shows it where these files are not, and dmsg has no public address that they could be completed with.
    """
    text = re.sub(r"<!--.*?-->\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


class BuildProto(Command):
    """The step of ``build`` that runs protoc; see setuptools' SubCommand."""

    editable_mode = False
    build_lib = None

    def initialize_options(self):
        """Do nothing: the command has no options."""

    def finalize_options(self):
        """Set the directory of the build."""
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
        """Return the generated files in the build."""
        return [str(Path(self.build_lib) / PROTO.parent / name) for name in OUTPUTS]

    def get_output_mapping(self):
        """Built -> source."""
        return {output: str(PROTO.parent / Path(output).name) for output in self.get_outputs()}

    def get_source_files(self):
        """Return the files for the source distribution."""
        return [str(PROTO)]


build.sub_commands = [("build_proto", None), *build.sub_commands]
setup(
    cmdclass={"build_proto": BuildProto},
    long_description=long_description(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
