"""Docstrings as this project writes them, plain text, turned into Markdown.

What is recognised: paragraphs; a term with an indented explanation below; sections like ``Raises:``; tables ruled with equals
signs; code after ``::``; other indented text, which is kept as it stands; double backticks and roles like ``:func:`x```.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_ROLE = re.compile(r":(?:func|class|mod|meth|attr|data|exc):`~?([^`]*)`")
_CODE = re.compile(r"``(.+?)``|`([^`]+)`")
_RULE = re.compile(r"=+(?: +=+)*$")
#: Sections whose entries are ``Name: text``, one below the other.
_SECTIONS = ("Raises:", "Args:", "Arguments:", "Returns:")
#: What a term may be: a word or two, names in backticks, names with commas between.
_TERM = re.compile(r"(?:``[^`]+``|[\w…-]+)(?:, (?:``[^`]+``|[\w…-]+))*$|[A-Z][\w ]{0,30}$")

#: Where a docstring turns from its arguments to what is done with them.
_BEHAVIOUR = re.compile(r"(?<=\.) (?=(?:Returns|Raises|Changes|Writes|Allocates) )")


def markdown(docstring: str | None, names: Collection[str] = ()) -> str:
    """A docstring without its indentation, as Markdown; empty for none.

    names: of arguments or fields; a paragraph ``name: what it is. other: what it is.`` becomes a list of them.
    """
    blocks = _blocks((docstring or "").splitlines())
    return "\n\n".join(_joined([_itemised(block, names) for block in blocks]) if names else blocks)


def inline(text: str) -> str:
    """One run of text: backticks and roles become code, what Markdown would read as markup is escaped."""
    text = _ROLE.sub(r"``\1``", text)
    parts, end = [], 0
    for found in _CODE.finditer(text):
        parts += [_escaped(text[end : found.start()]), f"`{found[1] or found[2]}`"]
        end = found.end()
    return "".join([*parts, _escaped(text[end:])])


def table(rows: list[list[str]]) -> str:
    """A Markdown table of rows of Markdown, the first of them its head."""
    head, *body = [[_cell(cell) for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    """A bar in code is none between columns, and a backslash would show there."""
    parts = re.split(r"(`[^`]*`)", text.replace("\n", " "))
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts)


def code(text: str) -> str:
    """Text as code in a line of Markdown, whatever it holds."""
    fence = "``" if "`" in text else "`"
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def explanations(docstring: str | None, names: Collection[str]) -> dict[str, str]:
    """What a docstring says of each name that it explains, as Markdown; not where it only sends its reader elsewhere."""
    found: dict[str, str] = {}
    for block in _blocks((docstring or "").splitlines()):
        for several, text in _items(block, names):
            for name in several.split(", ") if not text.startswith("see ") else ():
                found.setdefault(name, _BEHAVIOUR.split(text, maxsplit=1)[0].removesuffix(";"))
    return found


def _start(names: Collection[str]) -> re.Pattern[str]:
    """Where a paragraph begins to explain some of the names."""
    named = "|".join(map(re.escape, names))
    return re.compile(rf"(?:^|(?<=[.;] ))((?:{named})(?:, (?:{named}))*): ")


def _items(block: str, names: Collection[str]) -> list[tuple[str, str]]:
    found = list(_start(names).finditer(block))
    ends = [*(one.start() for one in found[1:]), len(block)]
    return [(one[1], block[one.end() : end].strip()) for one, end in zip(found, ends, strict=bool(found))]


def _itemised(block: str, names: Collection[str]) -> str:
    """A paragraph that explains names one after the other as a list; any other block as it is."""
    if not _start(names).match(block):
        return block
    items = _items(block, names)
    # what a function does with them is no part of the last one
    last, *after = _BEHAVIOUR.split(items[-1][1], maxsplit=1)
    items[-1] = items[-1][0], last
    listed = "\n".join(f"- {_names(name)}: {text.removesuffix(';')}" for name, text in items)
    return "\n\n".join([listed, *after])


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([*\[\]])", r"\\\1", text)


def _blocks(lines: list[str]) -> list[str]:
    """Blocks of Markdown of lines without common indentation."""
    blocks: list[str] = []
    at = 0
    while at < len(lines):
        if not lines[at].strip():
            at += 1
            continue
        if _RULE.match(lines[at]) and len(lines[at]) > 3:
            block, at = _table(lines, at)
            blocks.append(block)
            continue
        if lines[at].startswith(" "):
            inner, at = _indented(lines, at)
            blocks.append(_fenced(inner, "text"))
            continue
        end = at
        while end < len(lines) and lines[end].strip() and not lines[end].startswith(" "):
            end += 1
        paragraph = lines[at:end]
        at = end
        below = _next(lines, at)
        touching = at < len(lines) and lines[at].startswith(" ")
        if paragraph[-1].endswith("::") and below is not None and lines[below].startswith(" "):
            inner, at = _indented(lines, below)
            text = " ".join(paragraph)[:-1]
            blocks += [f"**{inline(text)}**" if len(text.split()) < 3 else inline(text), _fenced(inner, "python")]
        elif touching and paragraph[-1] in _SECTIONS:
            inner, at = _indented(lines, at)
            blocks += [inline(" ".join(paragraph[:-1]))] if paragraph[:-1] else []
            blocks.append(f"**{paragraph[-1]}**\n\n" + _entries(inner))
        elif touching and len(paragraph) == 1 and _TERM.match(paragraph[0]):
            inner, at = _indented(lines, at)
            blocks.append(_definition(paragraph[0], inner))
        elif touching:
            inner, at = _indented(lines, at)
            # a paragraph that goes on further in
            blocks.append(inline(" ".join([*paragraph, *(line.strip() for line in inner)])))
        else:
            blocks.append(inline(" ".join(paragraph)))
    return _joined(blocks)


def _joined(blocks: list[str]) -> list[str]:
    """Blocks, neighbouring items of a list as one."""
    joined: list[str] = []
    for block in blocks:
        if block.startswith("- ") and joined and joined[-1].startswith("- "):
            joined[-1] += "\n" + block
        else:
            joined.append(block)
    return joined


def _definition(term: str, inner: list[str]) -> str:
    """A term and its explanation: a list item, or a bold lead if the explanation is more than a paragraph."""
    if term == "Raises":
        return f"**{term}.**\n\n{_entries(inner)}"
    blocks = _blocks(inner)
    if re.match(r"[A-Z][a-z]", term):
        lead = f"**{inline(term)}.**"
        first = blocks[0] if blocks else ""
        glued = not first.startswith(("- ", "```", "|"))
        return "\n\n".join([f"{lead} {first}" if glued else lead, *blocks[1 if glued else 0 :]])
    return f"- {_names(term)}: " + "\n\n".join(blocks).replace("\n", "\n    ")


def _names(term: str) -> str:
    return inline(term) if "`" in term else ", ".join(f"`{name}`" for name in term.split(", "))


def _entries(lines: list[str]) -> str:
    """Entries ``Name: text``; deeper lines continue one. Text without a name is a paragraph."""
    items: list[list[str]] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1].append(line.strip())
        elif line.strip():
            items.append([line.strip()])
    rendered = []
    for item in items:
        text = " ".join(item)
        name = re.match(r"([A-Za-z_][\w, ]*?): ", text)
        rendered.append(f"- {_names(name[1])}: {inline(text[name.end() :])}" if name else f"- {inline(text)}")
    return "\n".join(rendered)


def _table(lines: list[str], at: int) -> tuple[str, int]:
    spans = [found.span() for found in re.finditer(r"=+", lines[at])]
    bounds = [(start, spans[i + 1][0] if i + 1 < len(spans) else None) for i, (start, _) in enumerate(spans)]
    rows: list[list[str]] = []
    rules = 0
    while at < len(lines) and rules < 3:
        line = lines[at]
        at += 1
        if _RULE.match(line):
            rules += 1
            continue
        cells = [line[start:end].strip() for start, end in bounds]
        if rows and rules == 2 and len(rows) > 1 and not cells[0]:
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    return table([[inline(cell) for cell in row] for row in rows]), at


def _indented(lines: list[str], at: int) -> tuple[list[str], int]:
    """The lines from ``at`` that are indented or empty, without their common indentation, and where they end."""
    end = at
    while end < len(lines) and (lines[end].startswith(" ") or not lines[end].strip()):
        end += 1
    inner = lines[at:end]
    while inner and not inner[-1].strip():
        inner.pop()
    common = min(len(line) - len(line.lstrip()) for line in inner if line.strip())
    return [line[common:] for line in inner], end


def _next(lines: list[str], at: int) -> int | None:
    return next((i for i in range(at, len(lines)) if lines[i].strip()), None)


def _fenced(lines: list[str], language: str) -> str:
    return "\n".join([f"```{language}", *lines, "```"])
