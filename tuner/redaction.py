"""Taking credentials out of text before it is kept: logs, tags, parameters, artifacts.

Three signs give a credential away: it stands behind a name that says so (a variable, an option, a
key of a document, a header), it has a form that issuers give their tokens, or it is the value of
such a variable in this process's environment. What is taken out is replaced by `MARK`; the name
stays, so that a reader sees what was there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MARK = "[redacted]"

_SECRET_WORDS = (
    r"token|secret|passwd|password|passphrase|credentials?|api[-_]?key|access[-_]?key(?:[-_]?id)?"
    r"|private[-_]?key|secret[-_]?key|account[-_]?key|auth(?:orization)?|bearer|cookie"
    r"|connection[-_]?string|sas|pat|dsn"
)
_SECRET_NAME = re.compile(
    rf"(?:^|[-_.]|(?<=[a-z])(?=[A-Z]))(?:{_SECRET_WORDS})(?:$|[-_.](?:id|value|key|file|b64)$)",
    re.IGNORECASE,
)
_NO_SECRET_NAMES = re.compile(r"tokenizer|tokens|num_|_per_|per_token|token_dispatcher", re.I)

_ASSIGNED = re.compile(
    r"""(?<![\w.])(?P<name>[A-Za-z][\w.-]{0,80})(?P<between>["']?\s*[:=]\s*)"""
    r"""(?P<value>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|(?:Bearer|Basic)\s+[^\s,;"']+|[^\s,;"'\]})&|]+)"""
)
_OPTION = re.compile(
    r"(?<![\w-])(?P<name>--?[A-Za-z][\w-]{0,80})(?P<between>['\",\s]+)(?P<value>[^\s'\",\]]+)"
)
_AUTHORIZATION = re.compile(r"\b(?P<kind>Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_URL_USER = re.compile(
    r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]{1,20}://)[^\s/?#'\"@]*(?:@[^\s/?#'\"@]*)*@"
)
_PEM = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_TOKEN_FORMS = re.compile(
    r"\b(?:"
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}"
    r"|glpat-[A-Za-z0-9_-]{16,}"
    r"|nvapi-[A-Za-z0-9_-]{16,}"  # NVIDIA NGC
    r"|sk-[A-Za-z0-9_-]{16,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS access key ids
    r"|dapi[0-9a-f]{32}"  # Databricks
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"  # JSON web tokens
    r")"
)
_SHORTEST_SECRET = 6


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without credentials; secret values of `environ` (unset: this process's) included."""
    environment = os.environ if environ is None else environ
    for value in _secret_values(tuple(sorted(environment.items()))):
        text = text.replace(value, MARK)
    text = _PEM.sub(MARK, text)
    text = _URL_USER.sub(rf"\g<scheme>{MARK}@", text)
    text = _AUTHORIZATION.sub(rf"\g<kind> {MARK}", text)
    text = _without_values(_ASSIGNED, text)
    text = _without_values(_OPTION, text)
    return _TOKEN_FORMS.sub(MARK, text)


def redact_value(value: Any, name: str = "") -> Any:
    """A JSON-like value with every text in it redacted; `name` is the key it stands under."""
    if isinstance(value, str):
        return MARK if value and is_secret_name(name) else redact(value)
    if isinstance(value, Mapping):
        return {key: redact_value(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_value(item, name) for item in value]
    return value


def is_secret_name(name: str) -> bool:
    """Whether a variable, option or key of this name holds a credential."""
    name = name.lstrip("-")
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAMES.search(name)


def _without_values(pattern: re.Pattern[str], text: str) -> str:
    """Replace the values of secret names; what stands behind another name is looked at itself."""
    parts, at = [], 0
    while match := pattern.search(text, at):
        value = match["value"]
        start = match.start("value")
        parts.append(text[at:start])
        at = start
        if is_secret_name(match["name"]) and not value.startswith("-"):
            quote = value[0] if value[0] in "\"'" else ""
            parts.append(f"{quote}{MARK}{quote}")
            at = match.end()
    return "".join([*parts, text[at:]])


@lru_cache(maxsize=8)
def _secret_values(environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Values of secret variables, the longest first, so that none is left in part."""
    values = {
        value
        for name, value in environment
        if is_secret_name(name) and len(value) >= _SHORTEST_SECRET and not value.isdigit()
    }
    return tuple(sorted(values, key=len, reverse=True))
