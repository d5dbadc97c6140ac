"""YAML as a specification uses it: PyYAML's safe subset without dates, explicit tags or repeated keys."""

from __future__ import annotations

from typing import Any

import yaml

_DATE = "tag:yaml.org,2002:timestamp"


class YamlError(Exception):
    """What is wrong, with its line where the parser knows it."""


def load_yaml(text: str) -> Any:
    """Plain data from YAML text; what looks like a date stays text.

    Raises:
        YamlError: broken YAML, a tag, or a key given twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise YamlError(f"{error.problem or error.context}{place}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(" ".join(str(error).split())) from None


def dump_yaml(plain: dict[str, Any]) -> str:
    """YAML text that `load_yaml` turns into the same data; keys keep their order."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def number_in_yaml(value: float) -> str:
    """A number spelled so that YAML 1.1 reads it as one: `1.0e-6`, never `1e-6`."""
    text = yaml.safe_dump(value).split("\n")[0]
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}e{power[0]}{power[1:].lstrip('0')}" if exponent else text


def _without_dates() -> dict[str, list[Any]]:
    rules = yaml.SafeLoader.yaml_implicit_resolvers
    return {first: [rule for rule in listed if rule[0] != _DATE] for first, listed in rules.items()}


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise yaml.composer.ComposerError(
                None, None, f"the tag {event.tag!r} is not allowed here", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                problem = f"the key {key.value!r} appears twice in one table"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Line breaks of Unicode are escaped: a quoted text that holds them bare is read back with spaces."""
    breaks = any(mark in value for mark in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if breaks else None)


_Dumper.add_representer(str, _text)
_Loader.yaml_implicit_resolvers = _Dumper.yaml_implicit_resolvers = _without_dates()
