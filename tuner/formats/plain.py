"""Export as the tuner's own YAML: what `tuner check`, `estimate` and `run` read."""

from __future__ import annotations

from typing import Any

from tuner.formats.result import Exported, Settings, exporter


@exporter("yaml")
def plain_yaml(settings: Settings) -> Exported:
    """Flat Megatron field names under `config`, the architecture under `model`."""
    import yaml

    config = dict(settings.fields)
    document: dict[str, Any] = {}
    if settings.model:
        document["model"] = {k: v for k, v in settings.model.items() if v is not None}
    for name in ("seq_length", "global_batch_size"):
        if settings.model and config.get(name) is not None:
            document[name] = config.pop(name)
    if settings.world_size is not None:
        document["world_size"] = settings.world_size
        config.pop("world_size", None)
    if settings.precision:
        document["precision"] = settings.precision
    document |= settings.place
    if settings.env:
        config["env"] = dict(settings.env)
    document["config"] = config
    heading = f"# for Megatron-Core {settings.mcore}\n"
    text = heading + yaml.safe_dump(_plain(document), sort_keys=False)
    return Exported("yaml", settings.mcore, text, env=dict(settings.env), left_out={})


def _plain(value: Any) -> Any:
    """Tuples as lists, which YAML's safe writer needs."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
