"""Arguments of public functions: the signature itself judges them, once, before anything begins.

    @arguments("atoll.reduce.found", "E-RED-02")
    def found(*, peers: Peers = 1, timeout_s: Annotated[Seconds, Meta(ge=0.1)] = 60.0) -> Group: ...

    E-RED-02 atoll.reduce.found(timeout_s=nan)
      likely cause: timeout_s is a number, at least 0.1, and this is none
      try: leave timeout_s out, which means 60.0, or see help(atoll.reduce.found)

Promises: what gets through is of the kind and within the bounds that the signature says; a number is finite, and
True is no number. Numbers of other libraries become Python's, lists become tuples where those are meant.
Never looks into an iterator, never judges whether arguments fit each other.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from inspect import Parameter, signature
from math import isfinite
from numbers import Real
from operator import index
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from atoll.base.errors import UsageError
from atoll.base.limits import AMOUNT_MOST, FACTOR_MOST, PEERS_MAX, WINDOW_LEAST_S, WINDOW_MOST_S

Peers = Annotated[int, Meta(ge=1, le=PEERS_MAX)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Whole = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[float, Meta(gt=0, le=FACTOR_MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=0, le=FACTOR_MOST)]  # a rate, a norm, a momentum
Window = Annotated[float, Meta(ge=WINDOW_LEAST_S, le=WINDOW_MOST_S)]  # seconds
Amount = Annotated[int, Meta(ge=0, le=AMOUNT_MOST)]  # of values or bytes

ALIKE = 0.6  # of difflib's ratio: "medain" is near "median", "int7" near "int8", "circle" near nothing

P = ParamSpec("P")
T = TypeVar("T")
PLAIN: dict[object, str] = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What to add to a refusal: the known words that have this one in them, or one or two near it; else nothing."""
    plain, letters = _letters(word), {_letters(name): name for name in known}
    near = [plain] if plain in letters else [name for name in letters if plain in name and len(plain) > 2]
    near = near or difflib.get_close_matches(plain, letters, 2, ALIKE)
    return f" (did you mean {' or '.join(repr(letters[name]) for name in near[:2])}?)" if near else ""


def _letters(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())


class _ArgumentMismatch(Exception):
    """This value is not of this kind."""


def arguments(name: str, code: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Judge the arguments of the function that people know by this name; UsageError with this code."""

    def hung(function: Callable[P, T]) -> Callable[P, T]:
        told, hints = signature(function), dict[str, Any]()

        @wraps(function)
        def entered(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                given = told.bind(*args, **kwargs)
            except TypeError as why:
                slip = "a slip in a name, or one of another version"
                raise UsageError(code, f"{name}: {why}", cause=slip, fix=f"help({name})") from None
            if not hints:  # not before: annotations may name what stands further down in their file
                hints.update(get_type_hints(function, include_extras=True))
            for argument, value in given.arguments.items():
                parameter = told.parameters[argument]
                if argument not in hints:
                    continue  # self
                try:
                    given.arguments[argument] = _each(value, hints[argument], parameter.kind)
                except _ArgumentMismatch:
                    raise _refusal(name, code, parameter, value, hints[argument]) from None
            return function(*given.args, **given.kwargs)

        return entered

    return hung


def checked_options(name: str, code: str) -> Callable[[type[T]], type[T]]:
    """Check the constructor arguments of an options class like those of a function, see `arguments`."""

    def decorated(options: type[T]) -> type[T]:
        options.__init__ = arguments(name, code)(options.__init__)
        return options

    return decorated


def _each(value: Any, hint: object, kind: object) -> Any:
    if kind is Parameter.VAR_POSITIONAL:
        return tuple(fitting(one, hint) for one in value)
    if kind is Parameter.VAR_KEYWORD:
        return {name: fitting(one, hint) for name, one in value.items()}
    return fitting(value, hint)


def fitting(value: Any, hint: object) -> Any:
    """This value as the annotation has it. _Unfit if it is no such thing."""
    plain: list[object] = []
    for kind in _kinds(get_args(hint)[0] if _own_words(hint) else hint):
        if _is_plain(kind):
            plain.append(kind)
        elif _is_a(value, kind):
            return value
    if not plain:
        raise _ArgumentMismatch
    try:
        found = msgspec.convert(_own(value), Union[tuple(plain)])  # noqa: UP007  # of a list
    except (msgspec.ValidationError, OverflowError):
        raise _ArgumentMismatch from None
    if any(isinstance(one, float) and not isfinite(one) for one in (found, *_items(found))):
        raise _ArgumentMismatch
    return found


def _refusal(name: str, code: str, parameter: Parameter, value: object, hint: object) -> UsageError:
    usual, argument = parameter.default, parameter.name
    leave = f"leave {argument} out, which means {usual!r}, or see " if usual is not Parameter.empty else ""
    return UsageError(
        code,
        f"{name}({argument}={reprlib.repr(value)})",
        cause=f"{argument} is {in_words(hint)}, and this is none",
        fix=f"{leave}help({name})",
    )


def in_words(hint: object) -> str:
    """'a whole number, at least 1'; Annotated[Recipe, "what diloco() returns"] has words of its own."""
    return _own_words(hint) or " or ".join(dict.fromkeys(_in_words(kind) for kind in _kinds(hint)))


def _own_words(hint: object) -> str:
    beside = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((one for one in beside if isinstance(one, str)), "")


def _in_words(kind: object) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = [(words, getattr(meta, key)) for meta in inside[1:] for key, words in BOUNDS.items()]
        return ", ".join([_in_words(inside[0]), *(f"{words} {end:,}" for words, end in bounds if end is not None)])
    if origin is Literal:
        return f"one of {', '.join(map(repr, inside))}"
    if kind is NoneType:
        return "None"
    if origin is Callable or kind is Callable:
        return "a function"
    if origin is not None and issubclass(cast(type, origin), Iterable) and origin is not dict:
        return f"a list, of {in_words(inside[0])} each" if inside else "a list"
    known = PLAIN.get(kind)
    return known or f"a {getattr(origin or kind, '__name__', kind)}"


def _kinds(hint: object) -> tuple[object, ...]:
    """What an annotation leaves open."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(one for kind in get_args(hint) for one in _kinds(kind))
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Sequence and all(_is_plain(kind) for kind in _kinds(inside[0])):
        return (tuple[inside[0], ...],)  # judged item by item, and text is none
    return (hint,)


def _is_plain(kind: object) -> bool:
    """True for what msgspec judges: numbers, text and lists of them."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is_plain(inside[0])
    if origin is tuple:
        return all(one is ... or all(map(_is_plain, _kinds(one))) for one in inside)
    return origin is Literal or kind in PLAIN or kind is NoneType


def _is_a(value: object, kind: object) -> bool:
    """True for an instance, where only the class is told of a kind."""
    if isinstance(kind, TypeVar) or kind is Any:
        return True
    known = cast(type, get_origin(kind) or kind)
    if known is Iterable and hasattr(type(value), "__getitem__"):  # a data set that is asked by index
        return not isinstance(value, str)
    return isinstance(value, known) and not (isinstance(value, str) and known is Sequence)


def _own(value: Any) -> Any:
    """Python's own, of other libraries' numbers and of ranges and arrays of them."""
    if isinstance(value, bool | str):
        return value
    try:
        return index(value)
    except (TypeError, ValueError):
        pass
    if isinstance(value, Real):
        return float(value)
    if issubclass(type(value), Sequence) or hasattr(value, "tolist"):
        with suppress(TypeError):  # an array of no dimension
            return tuple(map(_own, value))
    return value


def _items(value: object) -> tuple[object, ...]:
    return cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
