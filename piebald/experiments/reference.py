"""What an experiment file may have, read from its model: for help, for new files, and as a schema for editors."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Container
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from piebald.experiments.recipes import ExperimentFields
from piebald.experiments.run_settings import KEYS, RunSettings
from piebald.methods.catalog.recipe_help import documented

SCHEMA = "experiment.schema.json"


def meanings() -> dict[str, str]:
    """Return what each key of an experiment file means, in a few words; the settings of a run first."""
    said = {".".join(key): _documented(key) for key in KEYS.values()}
    said |= {
        info.alias or name: documented(ExperimentFields).get(name, "")
        for name, info in ExperimentFields.model_fields.items()
        if name not in RunSettings.model_fields
    }
    return {key: re.split(r"; |\. |, see |, e\.g\. |: ", text)[0] for key, text in said.items()}


def others(given: Container[str]) -> str:
    """Return the settings of a run that a file does not give, with their defaults, as comments.

    Args:
        given: the keys of the file; for a section that it has, nothing is added.
    """
    usual, lines = ExperimentFields.model_validate({"model": {"name": ""}}), list[str]()
    for name, (*sections, field) in KEYS.items():
        default = usual.value(name)
        if isinstance(default, BaseModel):  # a table, of which the kind suffices
            sections, field, default = [field], "kind", default.model_dump()["kind"]
        if (sections or [field])[0] not in given and default not in (None, []):
            lines.append(f"# {'.'.join([*sections, field])} = {json.dumps(default)}\n")
    return "".join(["# besides, with defaults, see piebald run --help:\n", *lines])


def schema() -> dict[str, Any]:
    """Return the JSON schema of experiment files."""
    table = ExperimentFields.model_json_schema(schema_generator=_Described)
    # chosen and taken out before a file is checked
    table["properties"]["scales"] = {"type": "object", "description": "keys that --scale NAME changes, by name"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **table}


class _Described(GenerateJsonSchema):
    """Describes properties by the docstrings of their models."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """See `GenerateJsonSchema`."""
        table, model = super().model_schema(schema), cast("type[BaseModel]", schema["cls"])
        table["description"] = (inspect.getdoc(model) or "").partition("\n\n")[0].replace("\n", " ")
        said = documented(model)
        for name, info in model.model_fields.items():
            if (written := table["properties"].get(info.alias or name)) is not None and name in said:
                written["description"] = said[name]
        return table


def _documented(key: tuple[str, ...]) -> str:
    *sections, field = key
    model: Any = RunSettings.model_fields[sections[0]].annotation if sections else RunSettings
    return documented(model)[field]
