"""Mutants of source files: a list of all, and a random sample.

Cosmic Ray makes the mutants. Mutants that no test can or should notice are left out: of annotations, which nothing
evaluates; of a module's constants, which are decisions (docs/limits.md); of arguments of decorators, such as the size
of a cache; of the star of a signature; of rows of options, which tables of the documentation repeat (tests/docs
compares them); and of assertions, which hold whatever a test does.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.equivalent import is_equivalent

ROOT = Path(__file__).parents[2]

Place = tuple[int, int]
"""Line and column."""
Left = tuple[Place, Place, str | tuple[str, ...]]
"""First place, place after the last one, and words in the names of the operators that are left out in this range."""
ALL, VALUES, STARS = "", ("Number", "Operator"), ("BinaryOperator",)


@dataclass(slots=True, frozen=True, order=True)
class Mutant:
    """One change of one file; ``occurrence`` counts the places where its operator could work."""

    file: str
    place: Place
    operator: str
    occurrence: int


def left_out(tree: ast.Module) -> list[Left]:
    """Return the ranges in which mutants of some operators, or of all, are left out."""
    places: list[Left] = []

    def add(node: ast.expr | None, words: str | tuple[str, ...]) -> None:
        if node is not None:
            end = node.end_lineno or node.lineno, node.end_col_offset or 0
            places.append(((node.lineno, node.col_offset), end, words))

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            add(node.returns, ALL)
            places.append(((node.lineno, node.col_offset), (node.body[0].lineno, 0), STARS))
        elif isinstance(node, ast.arg | ast.AnnAssign):
            add(node.annotation, ALL)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call):
                    places.append(((decorator.lineno, 0), (decorator.end_lineno or 0, 999), ALL))
        if isinstance(node, ast.Assert):
            add(node.test, ALL)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "option":
            add(node, ALL)
    for node in tree.body:
        if isinstance(node, ast.Assign) and all(
            isinstance(name, ast.Name | ast.Tuple) and ast.unparse(name).isupper() for name in node.targets
        ):
            add(node.value, VALUES)
    return places


def _operators() -> list[tuple[str, Any]]:
    from cosmic_ray import plugins

    every = [(name, plugins.get_operator(name)) for name in sorted(plugins.operator_names())]
    # "is" and "==" are the same for what is compared here.
    return [
        (name, made())
        for name, made in every
        if not made.arguments() and not name.endswith(("_Is", "_IsNot", "_Is_Eq", "_IsNot_NotEq"))
    ]


def mutants_of(file: str) -> list[Mutant]:
    """Return the mutants of a file that are not left out."""
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (ROOT / file).read_text()
    places, nodes = left_out(ast.parse(source)), list(ast_nodes(get_ast(source)))
    found = []
    for name, operator in _operators():
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(positions):
            words = [words for first, last, words in places if first <= start < last]
            if not any(word == ALL or any(part in name for part in word) for word in words):
                found.append(Mutant(file, start, name, occurrence))
    return found


def mutated(mutant: Mutant) -> str:
    """Return the source of the mutant's file with its change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source: str = mutate_code((ROOT / mutant.file).read_text(), get_operator(mutant.operator)(), mutant.occurrence)
    return source


def difference(mutant: Mutant) -> tuple[str, str]:
    """Return the line that the mutant changes, as it is and as it becomes, without white space around it."""
    before, after = (ROOT / mutant.file).read_text().splitlines(), mutated(mutant).splitlines()
    if len(before) != len(after):  # A decorator is gone.
        return before[mutant.place[0] - 1].strip(), ""
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    return ("", "") if not changed else (changed[0][0].strip(), changed[0][1].strip())


def sample(files: Iterable[str], number: int, seed: int) -> list[Mutant]:
    """Return ``number`` random mutants of the files, at most one of each place.

    An operator, of which a dozen mutants are made, counts no more than a number.
    """
    by_place: dict[tuple[str, Place], list[Mutant]] = {}
    for file in sorted(files):
        for mutant in mutants_of(file):
            by_place.setdefault((file, mutant.place), []).append(mutant)
    chance = random.Random(seed)
    places = [mutants for _, mutants in sorted(by_place.items())]
    chance.shuffle(places)
    chosen: list[Mutant] = []
    for mutants in places:
        mutant = chance.choice(sorted(mutants))
        if len(chosen) < number and not is_equivalent(mutant.file, *difference(mutant)):
            chosen.append(mutant)
    return chosen
