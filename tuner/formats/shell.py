"""Shell text: quoting what is written, and reading the words of launch scripts."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.formats.shell_flow import Flow

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(
    r"\$(?:([A-Za-z_]\w*|[\d@*#])|\{([A-Za-z_]\w*|[\d@*])(?:\[[@*]\])?"
    r"(?:(:?[-=+])((?:[^{}$]|\$\w|\$\{[^{}]*\})*))?\})"
)
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_STARTS_A_RUN = re.compile(
    r"\b(torchrun|torch\.distributed|srun|python3?|pretrain_\w+)\b[^\n]*\s--?\w"
)
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=([^}]*)\}")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_OPERATORS = frozenset((";", ";;", ";&", ";;&", "&&", "||", "|", "&"))
_SETTERS = frozenset(("export", "declare", "local", "readonly", "typeset", "let"))
_MAX_DEPTH = 20
_MAX_CHARACTERS = 1_000_000  # of a variable
_MAX_CALLS = 200  # of functions
_MAX_ARGUMENTS = 10_000
_HEAD = r"[ \t]*(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([A-Za-z_][\w-]*)[ \t]*\([ \t]*\))"
_FUNCTION = re.compile(_HEAD + r"[ \t]*\{(|\s.*)", re.DOTALL)
_BRACE_BELOW = re.compile(rf"^({_HEAD})\s*\n[ \t]*\{{", re.MULTILINE)
_REST_OF_ARGUMENTS = re.compile(r"\$\{[@*]:(\d{1,4})(?::(\d{1,4}))?\}")
_BRACED = re.compile(r"\$\{[^{}\"']*\}")
_SPACE = "\x1f"
"""Stands for a space inside `${...}`, which does not end a word."""


def exports(env: Mapping[str, str]) -> list[str]:
    """`export NAME=VALUE` lines."""
    return [f"export {name}={shlex.quote(value)}" for name, value in env.items()]


def array(name: str, words: Sequence[str]) -> list[str]:
    """A Bash array with an option and its values on a line each."""
    lines = [f"{name}=("]
    for word in words:
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines[-1].startswith("  --"):
            lines.append(f"  {quoted}")
        else:
            lines[-1] += f" {quoted}"
    return [*lines, ")"]


@dataclass(slots=True)
class Script:
    """What a shell text says: words of each command, exported variables, and all variables.

    `undecided` are the conditions whose branches were all read, since only a run decides them.
    Positional parameters are variables of their number, where they are known.
    """

    commands: list[list[str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    variables: dict[str, list[str]] = field(default_factory=dict)
    undecided: list[str] = field(default_factory=list)
    _functions: dict[str, list[str]] = field(default_factory=dict)
    _called: list[str] = field(default_factory=list)
    _depth: int = 0


def read_script(text: str, given: Sequence[str] = ()) -> Script:
    """The commands of a script with its variables put in, as far as they run (`shell_flow`).

    `given` is what it is started with: arguments in order, and `NAME=VALUE` for variables of its
    environment. Bodies of loops are read once, those of functions where they are called, or else
    at the end. Raises ValueError where the quoting never ends.
    """
    script = Script()
    _start(script, given)
    text, documents = _without_heredocs(text)
    _read_lines(text, script)
    _set_arguments(script, None)  # what follows is not started with them
    for name, body in script._functions.items():
        if name not in script._called:
            _read_body(body, script)
    undecided = list(dict.fromkeys(script.undecided))
    for document in documents:
        if _STARTS_A_RUN.search(document):  # a job script that this one writes
            _read_lines(document, script)
    script.undecided = undecided
    return script


def _start(script: Script, given: Sequence[str]) -> None:
    arguments = []
    for word in given:
        if (match := _ASSIGNMENT.fullmatch(word)) and not match[2]:
            script.variables[match[1]] = [match[3]]
            script.env[match[1]] = match[3]
        else:
            arguments.append(word)
    if arguments:
        _set_arguments(script, arguments)


def _set_arguments(script: Script, arguments: Sequence[str] | None) -> None:
    """Make these the positional parameters; None makes them unknown."""
    if arguments is None:
        for name in [name for name in script.variables if not name.isidentifier()]:
            del script.variables[name]
        return
    if len(arguments) > _MAX_ARGUMENTS:
        raise ValueError("the arguments grow beyond measure")
    for number in range(1, 10):
        script.variables[str(number)] = list(arguments[number - 1 : number])
    for name in ("@", "*"):
        script.variables[name] = list(arguments)
    script.variables["#"] = [str(len(arguments))]


def _shift(script: Script, words: Sequence[str]) -> None:
    """`shift [N]`, where the arguments are known."""
    known = script.variables.get("@")
    count = words[0] if words else "1"
    if known is not None and count.isdigit() and int(count) <= len(known):
        _set_arguments(script, known[int(count) :])


def _read_lines(text: str, script: Script) -> None:
    """Read a text into the script: its functions, then its commands."""
    lines = _logical_lines(_BRACE_BELOW.sub(r"\1 {", text))
    _read_body(_without_functions(lines, script), script)


def _without_functions(lines: Sequence[str], script: Script) -> list[str]:
    """The lines that are not in the body of a function; bodies are kept by name."""
    kept: list[str] = []
    following = iter(lines)
    for line in following:
        found = _FUNCTION.fullmatch(line)
        if found is None:
            kept.append(line)
            continue
        body = [found[3]]
        depth = 1 + _opened(found[3])
        while depth > 0 and (inner := next(following, None)) is not None:
            body.append(inner)
            depth += _opened(inner)
        if depth <= 0:
            body[-1] = body[-1][: body[-1].rfind("}")]
        script._functions[found[1] or found[2]] = body
    return kept


def _opened(line: str) -> int:
    """Braces that a line opens, less those that it closes."""
    words = _split(line)
    return words.count("{") - words.count("}")


def _call(words: Sequence[str], script: Script) -> None:
    """Read the body of a function with its own arguments."""
    name, *arguments = words
    script._called.append(name)
    if len(script._called) > _MAX_CALLS or script._depth >= _MAX_DEPTH:
        return
    outer = script.variables.get("@")
    _set_arguments(script, arguments)
    script._depth += 1
    _read_body(script._functions[name], script)
    script._depth -= 1
    _set_arguments(script, outer)


def _read_body(lines: Sequence[str], script: Script) -> None:
    flow = Flow()
    at = 0
    while at < len(lines):
        end = _end_of_argument_loop(lines, at) if "@" in script.variables else None
        following = (at if end is None else end) + 1
        again = True
        while again:  # only loops that leave fewer arguments
            before = len(script.variables.get("@", ()))
            for line in lines[at:following]:
                _read_line(line, script, flow)
            again = end is not None and len(script.variables["@"]) < before
        at = following
    script.undecided += flow.undecided


def _end_of_argument_loop(lines: Sequence[str], at: int) -> int | None:
    """The last line of a loop that takes arguments one after the other; None where none begins."""
    if not re.match(r"\s*while\b.*\$(#|1|\{1)", lines[at]):
        return None
    depth = 0
    for place in range(at, len(lines)):
        words = _split(lines[place])
        depth += words.count("do") - words.count("done")
        if depth <= 0 and "done" in words:
            return place
    return None


def _without_heredocs(text: str) -> tuple[str, list[str]]:
    """The text without the bodies of its here-documents, and these."""
    kept: list[str] = []
    bodies: list[str] = []
    end, body = "", [""]
    for line in text.splitlines():
        if end:
            if line.strip() == end:
                bodies.append("\n".join([*body, ""]))
                end = ""
            else:
                body.append(line)
            continue
        kept.append(line)
        found = _HEREDOC.search(line)
        if found and not line.lstrip().startswith("#"):
            end, body = found[2], []
            kept[-1] = line[: found.start()] + line[found.end() :]
    if end:  # it never ends: no here-document after all
        kept += body
    return "\n".join([*kept, ""]), bodies


def _logical_lines(text: str) -> list[str]:
    """Lines with continuations joined and arrays and open quotes kept together."""
    lines: list[str] = []
    pending: list[str] = []
    part, quote, array = "", "", False
    text = re.sub(r"\\\r?\n", " ", text)
    for raw in re.sub(r"(&&|\|\||\|)[ \t]*\r?\n", r"\1 ", text).splitlines():
        part = f"{part}\n{raw}" if part else raw
        if quote not in raw:
            continue
        words, quote = _words(part)
        if words is None:
            continue
        pending.append(part)
        part = ""
        array = array or any(_array_start(word) for word in words)
        if array and not any(word.endswith(")") for word in words):
            continue
        lines.append("\n".join(pending))
        pending, array = [], False
    if part or pending:
        lines.append("\n".join([*pending, part] if part else pending))
    return lines


def _words(text: str) -> tuple[list[str] | None, str]:
    """The words of a text; None where a quote is still open, and what would close it."""
    lexer = _lexer(text)
    try:
        return list(lexer), ""
    except ValueError:
        open_quote = getattr(lexer, "state", None)  # typeshed does not know it
        return None, open_quote if open_quote in ("'", '"') else ""


def _array_start(word: str) -> bool:
    match = _ASSIGNMENT.fullmatch(word)
    return match is not None and match[3].startswith("(") and not match[3].startswith("()")


def _split(text: str) -> list[str]:
    return [word.replace(_SPACE, " ") for word in _lexer(text)]


def _lexer(text: str) -> shlex.shlex:
    text = _ARITHMETIC.sub(lambda found: re.sub(r"\s+", "", found[0]), _without_comments(text))
    text = _BRACED.sub(lambda found: found[0].replace(" ", _SPACE), text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";")
    lexer.whitespace_split = True
    lexer.commenters = ""
    return lexer


def _without_comments(text: str) -> str:
    """The text without what stands from a `#` at the start of a word to the end of its line."""
    if "#" not in text:
        return text
    kept: list[str] = []
    quote, before, comment, escaped = "", "\n", False, False
    for character in text:
        if comment:
            comment = character != "\n"
        elif not quote and character == "#" and not escaped and before in " \t\n;|&(":
            comment = True
        elif quote:
            quote = "" if character == quote and not escaped else quote
        elif character in "'\"" and not escaped:
            quote = character
        escaped = character == "\\" and not escaped and quote != "'"
        before = character
        if not comment:
            kept.append(character)
    return "".join(kept)


def _read_line(line: str, script: Script, flow: Flow) -> None:
    command: list[str] = []
    joined, until = ";", ""

    def value(word: str) -> str | None:
        return _text(word, script)

    for word in [*_split(line), ";"]:
        if until or word not in _OPERATORS:
            command.append(word)
            if word == "[[" or (not until and _array_start(word)):
                until = "]]" if word == "[[" else ")"
            until = "" if until and word.endswith(until) else until
            continue
        if command:
            _read_command(flow.step(command, joined, value), script)
            command = []
        joined = word if word in ("&&", "||", "|") else ";"
        if word.startswith(";;"):
            flow.end_of_case()
    if command:  # an array that never ends
        _read_command(flow.step(command, joined, value), script)


def _read_command(words: Sequence[str], script: Script) -> None:
    """One command, or the variables that it sets."""
    if words[:1] and words[0] in _SETTERS:
        named = [word for word in words[1:] if not word.startswith("-")]
        words = named if named and _array_start(named[0]) else words
    if words and _array_start(words[0]):
        _read_array(words, script)
        return
    exported = words[:1] == ["export"]
    if words and words[0] in _SETTERS:
        words = [word for word in words[1:] if not word.startswith("-")]
    if exported:
        words = sorted(words, key=lambda word: "=" not in word)  # those without a value set none
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        if match[3] == "()":
            script.variables[match[1]] = []
            words = words[1:]
            continue
        values = _expand_word(match[3], script)
        name = match[1]
        previous = script.variables.get(name, []) if match[2] else []
        joined = " ".join([*previous, *values])
        if len(joined) > _MAX_CHARACTERS:
            raise ValueError(f"the variable {name} grows beyond measure")
        script.variables[name] = joined.split() if " " in joined else [joined]
        if exported or len(words) > 1:
            script.env[name] = joined
        words = words[1:]
    for word in words:
        for name, value in _DEFAULT.findall(word):  # as in `: ${TP:=2}`
            script.variables.setdefault(name, _expand_word(value, script))
    if words:
        words = [part for word in words for part in _expand_word(word, script)]
        if words[:1] == ["shift"]:
            _shift(script, words[1:])
        elif words[:2] == ["set", "--"]:
            _set_arguments(script, words[2:])
        elif words and words[0] in script._functions:
            _call(words, script)
        else:
            script.commands.append(words)


def _read_array(words: Sequence[str], script: Script) -> None:
    match = _ASSIGNMENT.fullmatch(words[0])
    assert match is not None
    inner = [match[3][1:], *words[1:]]
    end = next((at for at, word in enumerate(inner) if word.endswith(")")), len(inner) - 1)
    inner = inner[: end + 1]
    inner[-1] = inner[-1].removesuffix(")")
    values = [value for word in inner if word for value in _expand_word(word, script)]
    before = script.variables.get(match[1], []) if match[2] else []
    script.variables[match[1]] = before + values


def _expand_word(word: str, script: Script, depth: int = 0) -> list[str]:
    """A word with variables put in; one that is a variable alone may become several words."""
    word = _ARITHMETIC.sub(lambda found: _computed(found, script), word)
    rest = _REST_OF_ARGUMENTS.fullmatch(word)
    if rest is not None and "@" in script.variables:
        first = max(0, int(rest[1]) - 1)
        last = None if rest[2] is None else first + int(rest[2])
        return script.variables["@"][first:last]
    whole = _REFERENCE.fullmatch(word)
    if whole is not None and depth < _MAX_DEPTH:
        name, sign, other = whole[1] or whole[2], whole[3] or "", whole[4]
        known = script.variables.get(name)
        if sign.endswith("+"):
            parts = other.split() if other and any(known or ()) else []
            return [word for part in parts for word in _expand_word(part, script, depth + 1)]
        if known is not None and (any(known) or not other):
            return [part for part in known if part]
        return _expand_word(other, script, depth + 1) if other else [word]

    def value(match: re.Match[str]) -> str:
        known = script.variables.get(match[1] or match[2])
        if (match[3] or "").endswith("+"):
            return match[4] if any(known or ()) else ""
        if known is not None:
            return " ".join(known)
        return match[4] if match[4] is not None else match[0]

    return [_REFERENCE.sub(value, word)]


def _text(word: str, script: Script) -> str | None:
    """A word as a test sees it: what nobody set is empty, and None what only a run would tell."""
    if "@" not in script.variables:
        word = word.replace("$#", "0").replace("${#@}", "0")
        word = re.sub(r"\$\{?[@*]\}?", "", word)
    word = word.replace("${#@}", "$#")
    text = " ".join(_expand_word(word, script))
    text = _REFERENCE.sub(
        lambda found: "" if (found[3] or "").endswith("+") else found[4] or "", text
    )
    return None if "$" in text or "`" in text else text


def _computed(found: re.Match[str], script: Script) -> str:
    """The value of `$((...))` on whole numbers; the text itself where it has none here."""

    def number(match: re.Match[str]) -> str:
        known = script.variables.get(match[1], [match[2] or ""])
        return known[0] if len(known) == 1 and re.fullmatch(r"\d{1,12}", known[0]) else "?"

    text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)(?::-(\d+))?\}?", number, found[1])
    if not re.fullmatch(r"[\d+\-*/%() ]{1,200}", text) or "**" in text:
        return found[0]
    try:
        return str(_value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return found[0]


def _quotient(one: int, other: int) -> int:
    """Bash rounds towards zero."""
    size = abs(one) // abs(other)
    return size if (one < 0) == (other < 0) else -size


_OPERATIONS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda one, other: one - other * _quotient(one, other),
}


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("is no arithmetic on whole numbers")
