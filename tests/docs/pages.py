"""What the tests of the documentation read: the pages, and the repository that they speak of."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])
FOLDERS = ("elastic", "workers", "tests", "docs", "examples", "cluster_configs", ".ci")
GENERATED = ("build", "__pycache__")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def files() -> list[Path]:
    """Those of the repository, without what tools leave in it."""
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in found if not {*path.parts} & {*GENERATED})


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(text: str) -> str:
    """A page without code blocks and comments."""
    return FENCE.sub("", re.sub(r"<!--.*?-->", "", text, flags=re.S))


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(page.read_text()) if kind == language]


def paragraphs(text: str) -> list[str]:
    """Prose in pieces that no sentence crosses: paragraphs, headings, items, cells of a table."""
    found: list[list[str]] = [[]]
    for line in prose(text).splitlines():
        bare = line.strip()
        if re.match(r"\||[-*] |\d+\. ", bare) or not bare:
            found.append([])
        if bare.startswith("|"):
            found += [[part] for part in re.split(r"(?<!\\)\|", bare)]
            found.append([])
        elif bare.startswith("#"):
            found += [[bare.lstrip("# ")], []]
        else:
            found[-1].append(re.sub(r"^([-*]|\d+\.) ", "", bare))
    return [" ".join(lines).strip() for lines in found if "".join(lines).strip()]


def sentences(text: str) -> list[str]:
    """Code counts as one word and ends no sentence; a colon and a semicolon end none either."""
    found: list[str] = []
    for paragraph in paragraphs(text):
        words = re.sub(r"`[^`]*`", "CODE", paragraph)
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", words)
        found += re.split(r"(?<=[.!?])[)\"*]* +(?=[A-Z(\"*])", words)
    return found


def num_words(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])
