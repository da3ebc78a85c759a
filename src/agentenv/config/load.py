"""Reading the configuration: defaults, then one TOML file, then the environment; the last wins."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from agentenv.config.schema import Config
from agentenv.core.errors import InvalidInput

FILE_VARIABLE = "AENV_CONFIG"
DEFAULT_FILE = Path("/etc/agentenv/config.toml")


def settings() -> Iterator[tuple[str, str, FieldInfo]]:
    """Every setting as (section, key, field), in schema order."""
    for section, section_field in Config.model_fields.items():
        model = section_field.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise TypeError(f"section {section} of the schema is not a model")
        for key, field in model.model_fields.items():
            yield section, key, field


def variable(section: str, key: str) -> str:
    """The environment variable of a setting."""
    return f"AENV_{section}_{key}".upper()


def load(file: Path | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration in force.

    `file` (or $AENV_CONFIG) must exist when named; the default file may be absent. Raises InvalidInput naming the
    setting, where it came from and what is wrong with it.
    """
    environ = os.environ if environ is None else environ
    values = _from_file(file, environ)
    sources = {(section, key): values_source for section, keys in values.items() for key, values_source in keys.items()}
    merged: dict[str, dict[str, Any]] = {section: {k: v[0] for k, v in keys.items()} for section, keys in values.items()}
    for section, key, field in settings():
        name = variable(section, key)
        if name in environ:
            raw: Any = environ[name]
            if get_origin(field.annotation) is tuple:
                raw = _items(raw)
            merged.setdefault(section, {})[key] = raw
            sources[(section, key)] = (raw, f"environment variable {name}")
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(str(part) for part in first["loc"][:2])
        section_origin = next((source for (section, _), (_, source) in sources.items() if section == where[0]), "configuration")
        origin = sources[where][1] if len(where) == 2 and where in sources else section_origin
        raise InvalidInput(
            f"setting {'.'.join(where)} from {origin}: {first['msg']}", "see `aenv config` for all settings and their defaults"
        ) from error


def _items(raw: str) -> Any:
    """A list from the environment: items with commas between them, or a JSON array."""
    if raw.strip().startswith("["):
        try:
            return json.loads(raw)
        except ValueError:
            pass  # an IPv6 address, say
    return [item.strip() for item in raw.split(",") if item.strip()]


def _from_file(file: Path | None, environ: Mapping[str, str]) -> dict[str, dict[str, tuple[Any, str]]]:
    named = file or (Path(environ[FILE_VARIABLE]) if FILE_VARIABLE in environ else None)
    path = named or DEFAULT_FILE
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        if named is None:
            return {}
        raise InvalidInput(f"configuration file {path} does not exist", f"create it, or unset {FILE_VARIABLE}") from error
    except OSError as error:
        raise InvalidInput(f"configuration file {path} cannot be read: {error.strerror}", "name a file this user may read") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise InvalidInput(f"configuration file {path} is not valid TOML: {error}", "mend the file and try again") from error
    result: dict[str, dict[str, tuple[Any, str]]] = {}
    for section, keys in data.items():
        if not isinstance(keys, dict):
            raise InvalidInput(f"configuration file {path}: `{section}` must be a [section]", "see `aenv config` for the sections")
        result[section] = {key: (value, str(path)) for key, value in keys.items()}
    return result
