"""Argument validation of public functions by their signature, once per call.

    @arguments("atoll.reduce.found", "E-RED-02")
    def found(*, peers: Peers = 1, timeout_s: Annotated[Seconds, Meta(ge=0.1)] = 60.0) -> Group: ...

    E-RED-02 atoll.reduce.found(timeout_s=nan)
      likely cause: timeout_s must be a number, at least 0.1
      try: leave timeout_s out, which means 60.0, or see help(atoll.reduce.found)

Invariants:
- An accepted value has the type and bounds of its annotation. Numbers are finite, and True is no number.
- Numbers of other libraries become Python's; lists become tuples if the annotation is a tuple.
- An AtollError leaves the function without the traceback below it.
Not responsible for: contents of iterators, relations between arguments.
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

from atoll.base.errors import AtollError, UsageError
from atoll.base.limits import AMOUNT_MOST, FACTOR_MOST, PEERS_MAX, WINDOW_LEAST_S, WINDOW_MOST_S

Peers = Annotated[int, Meta(ge=1, le=PEERS_MAX)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Whole = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[float, Meta(gt=0, le=FACTOR_MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=0, le=FACTOR_MOST)]  # rate, norm or momentum
Window = Annotated[float, Meta(ge=WINDOW_LEAST_S, le=WINDOW_MOST_S)]  # seconds
Amount = Annotated[int, Meta(ge=0, le=AMOUNT_MOST)]  # number of values or bytes

ALIKE = 0.6  # least difflib ratio of similar words: "medain" matches "median", "int7" "int8", "circle" no word

P = ParamSpec("P")
T = TypeVar("T")
PLAIN: dict[object, str] = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suffix of an error with up to two known words that contain or resemble this one; else empty."""
    plain, letters = _letters(word), {_letters(name): name for name in known}
    near = [plain] if plain in letters else [name for name in letters if plain in name and len(plain) > 2]
    near = near or difflib.get_close_matches(plain, letters, 2, ALIKE)
    return f" (did you mean {' or '.join(repr(letters[name]) for name in near[:2])}?)" if near else ""


def _letters(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())


class _ArgumentMismatch(Exception):
    """A value does not match its annotation."""


def arguments(name: str, code: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Validate the arguments of the function with this public name; raises UsageError with this code."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        declared, hints = signature(function), dict[str, Any]()

        @wraps(function)
        def validated(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                given = declared.bind(*args, **kwargs)
            except TypeError as why:
                cause = "a mistyped name, or an argument of another version"
                known = declared.parameters
                near = "".join(did_you_mean(one, known) for one in kwargs if one not in known)
                raise UsageError(code, f"{name}: {why}{near}", cause=cause, fix=f"help({name})") from None
            if not hints:  # resolved at the first call: annotations may name later definitions of their file
                hints.update(get_type_hints(function, include_extras=True))
            for argument, value in given.arguments.items():
                parameter = declared.parameters[argument]
                if argument not in hints:
                    continue  # self
                try:
                    given.arguments[argument] = _convert(value, hints[argument], parameter.kind)
                except _ArgumentMismatch:
                    raise _refusal(name, code, parameter, value, hints[argument]) from None
            try:
                return function(*given.args, **given.kwargs)
            except (AtollError, KeyboardInterrupt) as why:
                raise why.with_traceback(None) from None

        return validated

    return decorate


def checked_options(name: str, code: str) -> Callable[[type[T]], type[T]]:
    """Check the constructor arguments of an options class like those of a function, see `arguments`."""

    def decorated(options: type[T]) -> type[T]:
        options.__init__ = arguments(name, code)(options.__init__)
        return options

    return decorated


def _convert(value: Any, hint: object, kind: object) -> Any:
    """Convert one argument, or each item of a variadic one."""
    if kind is Parameter.VAR_POSITIONAL:
        return tuple(convert_argument(one, hint) for one in value)
    if kind is Parameter.VAR_KEYWORD:
        return {name: convert_argument(one, hint) for name, one in value.items()}
    return convert_argument(value, hint)


def convert_argument(value: Any, hint: object) -> Any:
    """Convert the value to its annotation. Raises _ArgumentMismatch if it does not match."""
    plain: list[object] = []
    for kind in _alternatives(get_args(hint)[0] if _own_description(hint) else hint):
        if _is_plain(kind):
            plain.append(kind)
        elif _is_instance(value, kind):
            return value
    if not plain:
        raise _ArgumentMismatch
    try:
        found = msgspec.convert(_to_python(value), Union[tuple(plain)])  # noqa: UP007  # union of a list
    except (msgspec.ValidationError, OverflowError):
        raise _ArgumentMismatch from None
    if any(isinstance(one, float) and not isfinite(one) for one in (found, *_tuple_items(found))):
        raise _ArgumentMismatch
    return found


def _refusal(name: str, code: str, parameter: Parameter, value: object, hint: object) -> UsageError:
    usual, argument = parameter.default, parameter.name
    leave = f"leave {argument} out, which means {usual!r}, or see " if usual is not Parameter.empty else ""
    shown = reprlib.repr(value)
    return UsageError(
        code,
        f"{name}({argument}={shown if shown.isprintable() else f'<{type(value).__name__}>'})",
        cause=f"{argument} must be {in_words(hint)}",
        fix=f"{leave}help({name})",
    )


def in_words(hint: object) -> str:
    """Describe an annotation: 'a whole number, at least 1', or the text in Annotated[Recipe, "…"]."""
    return _own_description(hint) or " or ".join(dict.fromkeys(_describe(kind) for kind in _alternatives(hint)))


def _own_description(hint: object) -> str:
    beside = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((one for one in beside if isinstance(one, str)), "")


def _describe(kind: object) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = [(words, getattr(meta, key)) for meta in inside[1:] for key, words in BOUNDS.items()]
        return ", ".join([_describe(inside[0]), *(f"{words} {end:,}" for words, end in bounds if end is not None)])
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


def _alternatives(hint: object) -> tuple[object, ...]:
    """Alternatives of an annotation."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(one for kind in get_args(hint) for one in _alternatives(kind))
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Sequence and all(_is_plain(kind) for kind in _alternatives(inside[0])):
        return (tuple[inside[0], ...],)  # checked item by item; text is no sequence here
    return (hint,)


def _is_plain(kind: object) -> bool:
    """Whether msgspec validates this type: numbers, text and lists of them."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is_plain(inside[0])
    if origin is tuple:
        return all(one is ... or all(map(_is_plain, _alternatives(one))) for one in inside)
    return origin is Literal or kind in PLAIN or kind is NoneType


def _is_instance(value: object, kind: object) -> bool:
    """Whether the value is an instance, for types with only a class to check."""
    if isinstance(kind, TypeVar) or kind is Any:
        return True
    known = cast(type, get_origin(kind) or kind)
    if known is Iterable and hasattr(type(value), "__getitem__"):  # a data set with access by index
        return not isinstance(value, str)
    return isinstance(value, known) and not (isinstance(value, str) and known is Sequence)


def _to_python(value: Any) -> Any:
    """Convert numbers, ranges and arrays of other libraries to Python's types."""
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
            return tuple(map(_to_python, value))
    return value


def _tuple_items(value: object) -> tuple[object, ...]:
    return cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
