"""The rules, one file per kin; every module here is imported by `registry.load_rules`."""

TRANSFORMER_CONFIG = "transformer/transformer_config.py: TransformerConfig.__post_init__"
