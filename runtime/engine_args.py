"""Flags by name -> ``EngineConfig``; what the CLI and ``coterie.LLM`` share.

A flag's name is the field's name in ``runtime.config`` (vLLM's where the meaning is the same), or
one of the aliases below.
"""

import dataclasses
import difflib
import types
import typing
from typing import Any, Literal

from coterie.errors import ConfigError
from coterie.runtime.config import (
    CacheConfig,
    EngineConfig,
    ModelArgs,
    ParallelConfig,
    SchedulerConfig,
    TimeoutConfig,
)

SECTIONS: dict[str, type] = {
    "model": ModelArgs,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
    "scheduler": SchedulerConfig,
    "timeouts": TimeoutConfig,
}
ALIASES = {
    "start_timeout_s": "start_s",
    "fault_timeout_s": "fault_s",
    "shutdown_timeout_s": "shutdown_s",
}


def flag_names() -> dict[str, str]:
    """Section of ``EngineConfig`` by flag name, aliases included."""
    names = {
        field.name: section
        for section, kind in SECTIONS.items()
        for field in dataclasses.fields(kind)
    }
    return names | {alias: names[name] for alias, name in ALIASES.items()}


def engine_config_from_flags(**flags: Any) -> EngineConfig:
    """Build a configuration; None means the default.

    Raises:
        TypeError: an unknown flag.
        ConfigError: a value of the wrong type or out of range.
    """
    known = flag_names()
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for flag, value in flags.items():
        if flag not in known:
            close = difflib.get_close_matches(flag, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"unknown option {flag!r}{hint}")
        if value is not None:
            section, name = known[flag], ALIASES.get(flag, flag)
            values[section][name] = _checked(SECTIONS[section], name, value)
    return EngineConfig(**{section: kind(**values[section]) for section, kind in SECTIONS.items()})


def _checked(section: type, name: str, value: Any) -> Any:
    kind = typing.get_type_hints(section)[name]
    flag = f"--{name.replace('_', '-')}"
    options = [kind]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
    option = options[0]
    if typing.get_origin(option) is Literal:
        allowed = typing.get_args(option)
        if value not in allowed:
            raise ConfigError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}")
        return value
    if option is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if option is str and hasattr(value, "__fspath__"):
        return str(value)
    if not isinstance(value, option) or (option is int and isinstance(value, bool)):
        raise ConfigError(f"{flag} must be of type {option.__name__}, got {value!r}")
    return value
