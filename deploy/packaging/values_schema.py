"""The keys of the settings in the schema of the chart's values, so that helm refuses a misspelt one.

`python -m kiln.deploy.packaging.values_schema` writes them, as `make pages` does.
"""

from __future__ import annotations

import json
import re
from typing import Final

from kiln.conf.settings.keys import list_keys
from kiln.deploy.stack.jars import PROJECT

SCHEMA: Final = PROJECT / "deploy/packaging/helm/kiln/values.schema.json"
_SETTINGS: Final = re.compile(r'(?<=\n)    "settings": \{\n.*?\n    \},\n(?=    "secrets")', re.DOTALL)
_SERVER: Final = r"([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}"
_SERVERS: Final = rf"^{_SERVER}(, *{_SERVER})*$"

Schema = dict[str, object]


def build_settings_schema() -> Schema:
    """Build the JSON schema of `settings`: which keys there are. Kiln itself checks their values."""
    sections: dict[str, Schema] = {}
    for (name, *below), is_table in list_keys().items():
        leaf: Schema = {"type": "object"} if is_table else {}
        _insert(sections, [name, *below], leaf)
    kafka = sections["kafka"]
    properties = kafka["properties"]
    assert isinstance(properties, dict)
    properties["bootstrap"] = {"type": "string", "pattern": _SERVERS}
    kafka["required"] = ["bootstrap"]
    return {"type": "object", "additionalProperties": False, "required": ["kafka"], "properties": sections}


def _insert(sections: dict[str, Schema], keys: list[str], leaf: Schema) -> None:
    name, *below = keys
    if not below:
        sections[name] = leaf
        return
    section = sections.setdefault(name, {"type": "object", "additionalProperties": False, "properties": {}})
    properties = section["properties"]
    assert isinstance(properties, dict)
    _insert(properties, below, leaf)


def insert_settings(text: str) -> str:
    """Replace the schema of `settings` in the text of the schema, a line for each section."""
    schema = build_settings_schema()
    sections = schema.pop("properties")
    assert isinstance(sections, dict)
    head = "".join(f"      {json.dumps(key)}: {json.dumps(value)},\n" for key, value in schema.items())
    lines = ",\n".join(f"        {json.dumps(name)}: {json.dumps(section)}" for name, section in sections.items())
    block = f'    "settings": {{\n{head}      "properties": {{\n{lines}\n      }}\n    }},\n'
    return _SETTINGS.sub(lambda _: block, text, count=1)


if __name__ == "__main__":
    SCHEMA.write_text(insert_settings(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")
