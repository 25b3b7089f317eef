# SPDX-License-Identifier: Apache-2.0
"""The one form of an error about a value that a user gave: rule, value, remedy; and bounds as annotations of fields.

    size: Annotated[int, In("[1, inf]"), "2 is usual"] = 2      # KEY must be >= 1, got 0; 2 is usual
    share: Annotated[float | None, In("(0, 1]")] = 0.5          # KEY must be null or lie in (0, 1], got 2.0; 0.5 is ...
    chunk: Annotated[int | str, In("[1, inf]", "auto")] = "auto"    # KEY must be auto or >= 1, got 0; auto is the ...
    kind: Annotated[str, OneOf(KINDS)] = "all"                  # KEY must be one of all, first, got 'fist'; did you ...

`check_fields` checks them, and that numbers are numbers; of a `Section` it does so by itself. It lives here because the
schedulers import nothing of the project but themselves, and every folder may import them.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args, get_type_hints

EXIT_REFUSED = 2
"""Exit code of a command line or a config that cannot be carried out."""
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 130, 141, 143
"""128 + the number of the signal, as in shells."""


@dataclass(frozen=True)
class In:
    """Bound of a number: an interval. `[0, inf)` is >= 0 and finite, `[0, inf]` may be infinite."""

    interval: str
    word: str | None = None
    """A text that is allowed too."""
    remedy = "{default} is the default"

    def holds(self, value: Any) -> bool:
        """True if a value lies in the interval, or is the word."""
        if isinstance(value, str):
            return value == self.word
        low, high = (float(bound) for bound in self.interval[1:-1].split(","))
        above = value > low if self.interval[0] == "(" else value >= low
        return above and (value < high if self.interval[-1] == ")" else value <= high)

    def rule(self, others: tuple[str, ...]) -> str:
        """The rule in words; `others`: further values that are allowed."""
        others = (*others, self.word) if self.word else others
        low, high = self.interval[1:-1].split(", ")
        start = f"be {' or '.join(others)} or " if others else ""
        if high != "inf":
            return f"{start}lie in {self.interval}"
        if low == "-inf":
            return f"{start or 'be '}finite"
        sign = ">" if self.interval[0] == "(" else ">="
        return f"{start or 'be '}{sign} {low}{' and finite' if self.interval[-1] == ')' else ''}"


@dataclass(frozen=True, eq=False)
class OneOf:
    """Bound of a text: the names that it may be."""

    names: Iterable[str]
    remedy = "choose one of these"

    def holds(self, value: Any) -> bool:
        """True if it is one of the names."""
        return value in tuple(self.names)

    def rule(self, others: tuple[str, ...]) -> str:
        """The rule in words."""
        return f"be {''.join(f'{other} or ' for other in others)}one of {', '.join(self.names)}"


def check_fields(section: Any, prefix: str, *, null: str | None = "null") -> None:
    """Require each field of a dataclass to lie within its annotation's bound. ValueError for the first that does not.
    `prefix`: the key as typed, up to the field's name; `null`: word for None as it is typed; None if it cannot be."""
    for name, bound, is_optional, remedy, kind in _bounds(type(section)):
        value, others = getattr(section, name), (null,) if is_optional and null else ()
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        holds = bound.holds(value) if is_number or isinstance(value, str) else value is None and is_optional
        if not holds:
            hint = suggestion(str(value), bound.names) if isinstance(bound, OneOf) else ""
            require(False, f"{prefix}{name} must {bound.rule(others)}", value, hint + remedy)


class Section:
    """Base of the dataclasses of settings, which checks their fields. `key`: of the section, as typed."""

    _key = ""

    def __init_subclass__(cls, key: str | None = None) -> None:
        cls._key = cls._key if key is None else key

    def __post_init__(self) -> None:
        check_fields(self, f"{self._key}.")


@cache
def _bounds(section: type) -> tuple[tuple[str, In | OneOf, bool, str, Any], ...]:
    """(name, bound, may it be None, remedy, types of numbers) of each field with a bound, which a class that gives it
    another default need not repeat."""
    hints, found = dict[str, Any](), []
    for one in reversed(section.__mro__):
        told = get_type_hints(one, include_extras=True)
        hints |= {name: hint for name, hint in told.items() if name not in hints or hasattr(hint, "__metadata__")}
    for field in fields(section):
        marks = getattr(hints[field.name], "__metadata__", ())
        for bound in (mark for mark in marks if isinstance(mark, In | OneOf)):
            kind = get_args(hints[field.name])[0]
            kinds = get_args(kind) or (kind,)
            default = "null" if field.default is None else field.default
            usual = "give such a value" if default is MISSING else bound.remedy.format(default=default)
            remedy = next((mark for mark in marks if isinstance(mark, str)), usual)
            found.append((field.name, bound, type(None) in kinds, remedy, (int, float) if float in kinds else int))
    return tuple(found)


def require(holds: bool, rule: str, value: object, remedy: str) -> None:
    """Raise ValueError `rule, got value; remedy` unless `holds`. `rule` starts with the key as typed."""
    if not holds:
        raise ValueError(f"{rule}, got {value!r}; {remedy}")


def require_value(key: str, given: object, wanted: object, why: str, remedy: str) -> None:
    """Require a key to have the one value that goes with a setting; `why` names the setting, and may give a reason."""
    require(given == wanted, f"{key} must be {as_typed(wanted)} {why}", given, remedy)


@contextmanager
def refusing(rule: str, value: object, remedy: str) -> Iterator[None]:
    """Context that reads or imports what the user gave, and may raise anything: ValueError in the form of `require`,
    with the exception, its first line, beside the value."""
    try:
        yield
    except (Exception, SystemExit) as error:
        cause = error if isinstance(error, ValueError) else error.__cause__ or error  # it says what it is about
        told = f"{type(cause).__name__}: {cause}".splitlines()[0]
        raise ValueError(f"{rule}, got {value!r} ({told}); {remedy}") from error


def number(value: int | str | None) -> int | None:
    """The number that a setting gives; None where it is a word such as auto, or null."""
    return value if isinstance(value, int) else None


def as_typed(value: object) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_typed, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def require_one_of(key: str, value: object, known: Iterable[str]) -> None:
    """Raise ValueError listing `known` unless `value` is one of them; says which one was probably meant."""
    names = tuple(known)
    hint = suggestion(str(value), names)
    require(value in names, f"{key} must be one of {', '.join(names)}", value, f"{hint}choose one of these")


def suggestion(given: str, known: Iterable[str]) -> str:
    """`did you mean NAME? ` for the known name closest to `given`, or nothing where none is close."""
    close = get_close_matches(given, tuple(known), n=1)
    return f"did you mean {close[0]}? " if close else ""


def check_class(found: Any, base: type, key: str) -> Any:
    """Return `found`, a class that can be made as `base`, with abstract and class methods that are called as its own.
    ValueError if it is another object."""
    is_class = isinstance(found, type) and issubclass(found, base)
    require(is_class, f"{key} must be a class of {base.__module__}.{base.__name__}", found, "derive it from that class")
    of_class = [name for name, own in vars(base).items() if isinstance(own, classmethod)]
    for name in ("__init__", *sorted(base.__abstractmethods__), *of_class):
        form = inspect.signature(getattr(base, name)).parameters
        called = f"{'class method ' * (name in of_class)}{name}({', '.join(form)})"
        with refusing(f"{key} must be a class of {base.__name__} with {called}", found.__name__, "write it so"):
            if name in found.__abstractmethods__:
                raise TypeError("it has none")
            if name in of_class and not isinstance(inspect.getattr_static(found, name), classmethod | staticmethod):
                raise TypeError("it is not decorated with @classmethod")
            inspect.signature(getattr(found, name)).bind(*form)
    return found


def settings_of(owner: str, config_class: type, arguments: Mapping[str, Any], key: str) -> Any:
    """Arguments of `owner`, a class or loss, as an instance of its dataclass of settings. ValueError: an unknown
    argument, a value of the wrong type, or a broken rule of the dataclass."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    is_dataclass = "__dataclass_fields__" in vars(config_class)  # its own, not its base's
    remedy = "decorate it with @dataclass(frozen=True)"
    require(is_dataclass, f"{key}: settings of {owner} must be a dataclass", config_class, remedy)
    known = list(get_type_hints(config_class))
    for name, value in arguments.items():
        rule = f"{key}.{name} must be a setting of {owner} ({', '.join(known) or 'it has none'})"
        require(name in known, rule, value, f"{suggestion(name, known)}take it out")
    try:
        schema: Any = OmegaConf.structured(config_class)
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{key}: fields of {config_class.__name__} must have types that OmegaConf knows, got {error.full_key} "
            f"({str(error.msg).splitlines()[0]}); write e.g. str, and check the value in __post_init__"
        ) from error
    try:
        OmegaConf.set_readonly(schema, False)
        made = OmegaConf.to_object(OmegaConf.merge(schema, dict(arguments)))
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{key}.{error.full_key} must have a value of its type, got {arguments.get(str(error.full_key))!r}; "
            f"{str(error.msg or error).splitlines()[0]}"
        ) from error
    except (ValueError, AssertionError) as error:  # a rule of the class
        told = str(error)
        raise ValueError(told if told.startswith(key) else f"{key}: {told}") from error
    check_fields(made, f"{key}.")
    return made


def shown(value: object, most: int = 80) -> str:
    """Format a value for a message: its first characters, if it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def first_of(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
