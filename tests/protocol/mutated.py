"""A module without one of its rules, by a change of its source text: the code needs no seams for it.

If a rule moves, whoever would delete it is told that it cannot be found any more.
"""

from pathlib import Path
from types import ModuleType


def without(module: ModuleType, rule: str, instead: str) -> ModuleType:
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(rule) == 1, f"{rule} is not in {module.__name__} any more"
    mutated = ModuleType(module.__name__)
    exec(compile(source.replace(rule, instead), module.__file__, "exec"), mutated.__dict__)
    return mutated
