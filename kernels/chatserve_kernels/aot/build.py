"""Compilation of recorded specialisations, in several processes, and what each binary needs.

Triton keeps what it has compiled in its cache (`TRITON_CACHE_DIR`), so what is built here for a machine's GPU need not
be compiled there when it is first launched.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from chatserve_kernels.aot import cover
from chatserve_kernels.aot.families import families
from chatserve_kernels.aot.record import recording
from chatserve_kernels.attend_hopper import WARPGROUP_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from chatserve_kernels.aot.record import Specialisation

    Chosen = Callable[[cover.Axes], Iterator[cover.Choice]]

COVERS: dict[str, Chosen] = {
    "values": cover.values,
    "pairs": cover.pairs,
    "triples": cover.triples,
    "all": cover.product,
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Usage(NamedTuple):
    registers: int
    """A thread."""
    stack_bytes: int
    """A thread; more than 0 means that registers spilled."""
    shared_bytes: int
    """A program."""


class Member(NamedTuple):
    """A specialisation, and the first call that launches it."""

    family: str
    choice: cover.Choice
    specialisation: Specialisation

    @property
    def label(self) -> str:
        """The kernel, its tile and target, and the options of the call."""
        constants = self.specialisation.constant_values
        tile = ""
        if "WARPGROUPS" in constants:
            tile = f" {WARPGROUP_ROWS * constants['WARPGROUPS']}x{constants['N']}"
        elif "M" in constants:
            tile = f" {constants['M']}x{constants['N']}"
        options = ", ".join(f"{axis} {shown(value)}" for axis, value in self.choice.items() if value is not None)
        target = self.specialisation.target
        return f"{self.specialisation.name.removesuffix('_kernel')}{tile} sm_{target.arch} ({self.family}: {options})"


def shown(value: object) -> str:
    """An option's value as a person writes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def members(how: str, where: Mapping[str, Sequence[str]] | None = None, names: Sequence[str] = ()) -> list[Member]:
    """What the calls of the families `names` (none: all) launch. `how` is one of `COVERS`; `where` leaves of an option
    the values that are named, as `shown`, and is nothing to families without such an option.

    Raises:
        ValueError: there is no family, option or value of such a name.
    """
    where = where or {}
    known = list(families())
    _expect_known("family", names, [family.name for family in known])
    chosen = [family for family in known if not names or family.name in names]
    _expect_known("option", where, [axis for family in chosen for axis in family.axes])
    for axis, allowed in where.items():
        _expect_known(axis, allowed, [shown(value) for family in chosen for value in family.axes.get(axis, ())])
    found: dict[str, Member] = {}
    for family in chosen:
        axes = family.axes | (family.classes if how == "values" else {})
        axes = {
            axis: [value for value in values if axis not in where or shown(value) in where[axis]]
            for axis, values in axes.items()
        }
        for choice in COVERS[how](axes):
            with recording(family.capability) as recorded:
                family.call(**choice)
            for each in recorded:
                found.setdefault(each.key, Member(family.name, choice, each))
    return list(found.values())


def _expect_known(kind: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"expected {kind} to be one of {', '.join(dict.fromkeys(known))}, not {name}")


def build(specialisation: Specialisation) -> Usage:
    """Needs no GPU: Triton's own assembler makes the binary, and its `cuobjdump` reads the resource usage back."""
    make_source = GluonASTSource if specialisation.kernel.is_gluon() else ASTSource
    source = make_source(
        specialisation.kernel, specialisation.signature, specialisation.constants, specialisation.attributes
    )
    compiled = triton.compile(source, target=specialisation.target, options=specialisation.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing = subprocess.run(  # noqa: S603 - Triton's own tool, on a file of ours
            [str(_CUOBJDUMP), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", listing)}
    return Usage(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared)


def build_all(chosen: Sequence[Member], num_processes: int) -> Iterator[tuple[Member, Usage | str]]:
    """Each member's usage as it is built, or why it could not be."""
    global _chosen
    _chosen = chosen
    if num_processes == 1:
        yield from ((chosen[index], usage) for index, usage in map(_build, range(len(chosen))))
        return
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        for index, usage in pool.imap_unordered(_build, range(len(chosen))):
            yield chosen[index], usage


_chosen: Sequence[Member] = ()


def _build(index: int) -> tuple[int, Usage | str]:
    try:
        return index, build(_chosen[index].specialisation)
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this one's result; the others go on
        return index, f"{type(error).__name__}: {error}"
