"""Hooks of the site (mkdocs.yml): generated pages, links out of docs/, pages that the navigation does not name."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from public import MODULES, commands, names_of  # noqa: E402
from site_docstrings import as_markdown  # noqa: E402
from tutorials import notebook  # noqa: E402

#: Files outside docs/ that have a page: where it lies.
COPIES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
EXAMPLES = sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name[0] not in "._")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append pages of docs/ that the navigation does not name to "How-to"."""
    nav = config.nav or []
    named = set(_files_of(nav))
    rest = [path.name for path in sorted(Path(config.docs_dir).glob("*.md")) if path.name not in named]
    sections = {name: listed for section in nav for name, listed in section.items()}
    sections["How-to"].extend(rest)
    sections["Reference"][1:1] = [{module: _page_of(module)} for module in MODULES] + [
        {"Commands": "reference/commands.md"},
        {"Commands that measure": "reference/bench.md"},
    ]
    sections["Tutorials"].extend({f"Example: {name.replace('_', ' ')}": f"examples/{name}.md"} for name in EXAMPLES)
    return config


def _files_of(nav: Any) -> list[str]:
    """All files that a part of the navigation names."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [each for part in parts for each in _files_of(part)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {target: (ROOT / source).read_text() for source, target in COPIES.items()}
    pages |= {f"examples/{name}.md": _example(name) for name in EXAMPLES}
    pages |= {_page_of(module): _module_page(module) for module in MODULES}
    pages["reference/commands.md"] = _commands_page()
    pages["reference/bench.md"] = _bench_page()
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
        if page.stem != "index":
            pages[f"tutorials/{page.stem}.ipynb"] = notebook(page.read_text())
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links to files of the repository into links to their pages; link a tutorial's notebook."""
    here = Path(page.file.src_uri).parent
    up = "../" * len(here.parts)

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        inside = target.removeprefix("docs/") if page.file.src_uri in COPIES.values() else target
        while inside.startswith("../"):
            inside = inside.removeprefix("../")
        if inside in COPIES:
            return f"]({up}{COPIES[inside]}{anchor})"
        if inside.rstrip("/").removeprefix("examples/") in EXAMPLES:
            return f"]({up}{inside.rstrip('/')}.md)"
        if inside.startswith("docs/"):
            return f"]({up}{inside.removeprefix('docs/')}{anchor})"
        return f"]({inside if page.file.src_uri in COPIES.values() else target}{anchor})"

    markdown = LINK.sub(moved, markdown)
    if here.name == "tutorials" and page.file.name != "index":
        title, _, rest = markdown.partition("\n")
        name = f"{page.file.name}.ipynb"
        markdown = f"{title}\n\n*Also as a notebook: [{name}]({name}).*\n{rest}"
    return markdown


#: What Material fetches from elsewhere for pages opened from a file, and the script of ours in its place.
SHIM, WORKER = "https://unpkg.com/iframe-worker/shim", "assets/file-worker.js"


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """The site fetches nothing from elsewhere."""
    return output.replace(SHIM, "../" * (len(Path(page.url).parts) - 1) + WORKER)


def _page_of(module: str) -> str:
    return f"reference/{module.replace('.', '-')}.md"


def _module_page(module: str) -> str:
    """The API reference of a module: its docstring, then every public name."""
    room = sys.modules[module] if module in sys.modules else __import__(module, fromlist=["_"])
    parts, values = [f"# {module}", "", _first_words(room), ""], []
    for name in names_of(module):
        member = getattr(room, name)
        home = getattr(member, "__module__", None)
        if (inspect.isclass(member) or inspect.isfunction(member)) and home and home.startswith("halocline"):
            parts += [f"::: {home}.{member.__qualname__}", ""]
        elif inspect.ismodule(member):
            values.append(f"| `{name}` | the module [`{member.__name__}`]({Path(_page_of(member.__name__)).name}) |")
        else:
            values.append(f"| `{name}` | `{type(member).__name__}` |")
    if values:
        parts += ["## Values and modules", "", "| name | what it is |", "|---|---|", *values, ""]
    return "\n".join(parts)


def _first_words(room: Any) -> str:
    """A module's docstring up to its first example."""
    return as_markdown(inspect.getdoc(room) or "")


def _commands_page() -> str:
    head = ["# Commands", "", "Written from `halocline --help` and the help of each command.", ""]
    return "\n".join([*head, *(line for path, command in commands() for line in _command(path, command))])


def _bench_page() -> str:
    from typer.main import get_command

    from benchmarks.commands.app import bench

    head = ["# Commands that measure", "", "They run from a checkout of the repository.", ""]
    found = commands(get_command(bench), "halocline bench")
    return "\n".join([*head, *(line for path, command in found for line in _command(path, command))])


def _command(path: str, command: Any) -> list[str]:
    """One command: usage, help, and a table of its options."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    named = [_name_of(each) if each.required else f"[{_name_of(each)}]" for each in arguments]
    usage = " ".join([path, *named, *(["COMMAND"] if hasattr(command, "commands") else []), "[OPTIONS]"])
    lines = [f"## {path}", "", "```text", usage, "```", "", inspect.cleandoc(command.help or ""), ""]
    rows = [row for each in command.params if (row := _option(each))]
    return [*lines, *(["| option | default | what it does |", "|---|---|---|", *rows, ""] if rows else [])]


def _name_of(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _option(parameter: Any) -> str:
    """A row of the table of options."""
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{_name_of(parameter)}`"
    default = parameter.default
    plain = isinstance(default, str | int | float | Path) and not isinstance(default, bool)
    shown = f"`{default}`" if plain and str(default) else ""
    words = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "\\|")
    return f"| {names} | {shown} | {words} |"


def _example(name: str) -> str:
    """The page of an example: its README, then its files."""
    folder = ROOT / "examples" / name
    readme = folder / "README.md"
    parts = [readme.read_text() if readme.exists() else f"# Example: {name.replace('_', ' ')}\n"]
    for path in sorted(folder.iterdir()):
        if path.suffix in (".py", ".toml"):
            kind = "python" if path.suffix == ".py" else "toml"
            parts.append(f'```{kind} title="{path.name}"\n{path.read_text()}```\n')
    return "\n".join(parts)
