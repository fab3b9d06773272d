"""Make the pages of the site that nobody writes: the reference of the library, the settings, the README, the notebook.

`mkdocs` calls `on_config`, `on_files` and `on_page_markdown` (mkdocs.yml); nothing is written into docs/, and nothing
of the library is imported. What is public: the names and modules that the face of a room (`__init__.pyi`) hands on, the
modules of `boundby.layers` and `boundby.partition` that people import, and everything without a leading underscore in
those and in the modules that stand directly in `boundby/`.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = {"examples/explain.ipynb": "notebook.md", "examples/first_card.ipynb": "first-card.md"}
# Files that stand beside docs/ in a checkout, and the pages that they become.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
PAGES |= {"SECURITY.md": "security.md", "configs/config.yaml": "reference/settings.md", **NOTEBOOKS}
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#]+)(#[^)]*)?\)")
WITHOUT_EXPORTS = {
    "boundby.layers": ("dashboard", "engine", "generation", "ranking", "records", "report"),
    "boundby.partition": ("plan", "running", "simulation"),
}
ALIAS = re.compile(r"[A-Z][a-z]\w*")  # `Bound = Literal[...]`, and not a constant
WIDEST = 110  # of a signature on one line
HEAD = """# Reference

Made from the docstrings of `boundby`, a page for each module. Import a name from the module under which it stands:
`from boundby.layers.engine import ObservabilityEngine`. Times are seconds and sizes bytes; a value that is not known is
`None`. [All settings](settings.md) of the pipeline have a page of their own.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = Function | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Module:
    """The source of one module, and the face of a room: the text of its `__init__.pyi`, None of any other module."""

    name: str
    source: str
    face: str | None = None

    @property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.source)

    @property
    def handed_on(self) -> dict[str, str]:
        """The module, by its whole name, that defines each public name of a room."""
        lines = [node for node in ast.parse(self.face or "").body if isinstance(node, ast.ImportFrom)]
        return {name.name: f"{self.name}.{line.module}" for line in lines if line.module for name in line.names}

    @property
    def modules(self) -> list[str]:
        """The modules that a room hands on whole."""
        lines = [node for node in ast.parse(self.face or "").body if isinstance(node, ast.ImportFrom)]
        return [f"{self.name}.{name.name}" for line in lines if not line.module for name in line.names]

    def definitions(self) -> dict[str, Node]:
        """Return what the module itself defines, by name, in the order of the source."""
        nodes: dict[str, Node] = {}
        for node in self.tree.body:
            if isinstance(node, Function | ast.ClassDef):
                nodes[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and (name := _assigned(node)):
                nodes[name] = node
        return nodes


def on_config(config: Any) -> Any:
    """Put a page for every public module into the navigation, where it names the reference."""
    reference = next(entry for entry in config.nav if "Reference" in entry)
    reference["Reference"] += [{module.name: f"reference/{module.name}.md"} for module in public_modules()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File

    for path, text in made_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links from one file of the checkout to another lead to its page."""
    return relinked(markdown, page.file.src_uri)


def relinked(text: str, path: str) -> str:
    """Return the Markdown of the page `path` with links to files of the checkout as links to their pages."""
    sources = {page: Path(source) for source, page in PAGES.items()}
    folder = sources.get(path, Path("docs", path)).parent

    def shown(match: re.Match[str]) -> str:
        target = ROOT.joinpath(folder, match[1]).resolve()
        if not target.is_relative_to(ROOT):
            return match[0]
        name = target.relative_to(ROOT).as_posix()
        name = PAGES.get(name, name.removeprefix("docs/"))
        up = "../" * path.count("/")
        return f"]({up}{name}{match[2] or ''})"

    is_made = path.startswith("reference/") and path not in sources  # has links of the site already
    return text if is_made else LINK.sub(shown, text)


def made_pages() -> dict[str, str]:
    """Return the text of every page that is made, by its path in the site."""
    modules = public_modules()
    made = {f"reference/{module.name}.md": "\n".join(_module(module)).rstrip() + "\n" for module in modules}
    rows = [f"| [{module.name}]({module.name}.md) | {_docstring(module.tree).splitlines()[0]} |" for module in modules]
    made["reference/index.md"] = "\n".join([HEAD, "| module | what it is for |", "| --- | --- |", *rows, ""])
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".yaml"):
            text = f"# All settings\n\n`{source}`, with the defaults.\n\n```yaml\n{text}```\n"
        made[page] = notebook_page(json.loads(text)) if source.endswith(".ipynb") else text
    return made


def notebook_page(document: dict[str, Any]) -> str:
    """Return the cells of a notebook as Markdown, with what they printed and showed."""
    parts: list[str] = []
    for cell in document["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            if "text/html" in shown:
                parts.append(f"<div>{''.join(shown['text/html'])}</div>")
            else:
                plain = "".join(output.get("text", shown.get("text/plain", ())))
                parts.append(f"```text\n{plain.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def public_modules() -> list[Module]:
    """Return the modules that people import from, by name."""
    names = [f"boundby.{path.stem}" for path in (ROOT / "boundby").glob("*.py") if not path.stem.startswith("_")]
    names += [f"{package}.{name}" for package, parts in WITHOUT_EXPORTS.items() for name in parts]
    rooms = [read(f"boundby.{path.parent.name}") for path in (ROOT / "boundby").glob("*/__init__.pyi")]
    names += [name for room in rooms for name in (room.name, *room.modules)]
    return [read(name) for name in sorted(set(names))]


def read(name: str) -> Module:
    """Return a module or a room by its name."""
    path = ROOT.joinpath(*name.split("."))
    if not path.is_dir():
        return Module(name, path.with_suffix(".py").read_text(encoding="utf-8"))
    face = path / "__init__.pyi"
    text = face.read_text(encoding="utf-8") if face.exists() else None
    return Module(name, (path / "__init__.py").read_text(encoding="utf-8"), text)


def public_names(module: Module) -> dict[str, tuple[Module, Node]]:
    """Return where each public name of a module is defined, and how."""
    if module.face is not None:
        origins = {name: read(origin) for name, origin in module.handed_on.items()}
        nodes = {name: (origin, origin.definitions().get(name)) for name, origin in origins.items()}
        return {name: (origin, node) for name, (origin, node) in nodes.items() if node}  # several constants on one line
    return {
        name: (module, node)
        for name, node in module.definitions().items()
        if not name.startswith("_") and (not isinstance(node, ast.Assign | ast.AnnAssign) or ALIAS.fullmatch(name))
    }


def _module(module: Module) -> Iterator[str]:
    yield from (f"# {module.name}", "", _docstring(module.tree), "")
    for name, (origin, node) in public_names(module).items():
        yield from (f"## {name}", "")
        if isinstance(node, ast.ClassDef):
            yield from _class(node, origin.source)
        elif isinstance(node, Function):
            yield from (*_code(_signature(node)), _docstring(node), "")
        else:
            yield from _code(_constant(name, node))


def _class(node: ast.ClassDef, source: str) -> Iterator[str]:
    bases = f"({', '.join(ast.unparse(base) for base in node.bases)})" if node.bases else ""
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign) and not _assigned(part).startswith("_")]
    methods = [part for part in node.body if isinstance(part, Function)]
    maker = next((method for method in methods if method.name == "__init__"), None)
    if maker and not fields:
        yield from _code(_signature(maker, f"{node.name}", is_method=True).removesuffix(" -> None"))
    else:
        yield from _code("\n".join([f"class {node.name}{bases}:", *_fields(fields, source)]))
    yield from (_docstring(node), "")
    for method in methods:
        if method.name.startswith("_"):
            continue
        name = f"{node.name}.{method.name}"
        decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
        shown = f"{name}{_returned(method)}" if "property" in decorators else _signature(method, name, is_method=True)
        yield from (*_code(shown), _docstring(method), "")


def _fields(fields: list[ast.AnnAssign], source: str) -> list[str]:
    """Return the fields as they stand in the source, with the comments behind them."""
    lines = source.splitlines()
    return [line for field in fields for line in lines[field.lineno - 1 : field.end_lineno]] or ["    ..."]


def _signature(node: Function, name: str = "", is_method: bool = False) -> str:
    """Return the call on one line, or with one argument a line where that is too long."""
    copy = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(copy, Function)
    if is_method and "staticmethod" not in {ast.unparse(decorator) for decorator in copy.decorator_list}:
        (copy.args.posonlyargs or copy.args.args).pop(0)
    head, returned = name or copy.name, _returned(copy)
    arguments = list(_arguments(copy.args))
    whole = f"{head}({', '.join(arguments)}){returned}"
    if len(whole) <= WIDEST:
        return whole
    return "\n".join([f"{head}(", *(f"    {argument}," for argument in arguments), f"){returned}"])


def _arguments(given: ast.arguments) -> Iterator[str]:
    """Yield each argument with its type and default."""
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    for number, (argument, default) in enumerate(zip(positional, defaults, strict=True), 1):
        yield _argument(argument, default)
        if number == len(given.posonlyargs):
            yield "/"
    if given.vararg or given.kwonlyargs:
        yield f"*{ast.unparse(given.vararg) if given.vararg else ''}"
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _argument(argument, default)
    if given.kwarg:
        yield f"**{ast.unparse(given.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if argument.annotation else "="
    return ast.unparse(argument) + ("" if default is None else equals + ast.unparse(default))


def _returned(node: Function) -> str:
    return f" -> {ast.unparse(node.returns)}" if node.returns else ""


def _constant(name: str, node: ast.Assign | ast.AnnAssign) -> str:
    value = ast.unparse(node.value) if node.value else "..."
    return f"{name} = {value}" if len(value) <= WIDEST else f"{name} = ..."


def _assigned(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _docstring(node: ast.Module | ast.ClassDef | Function) -> str:
    """Return the docstring as Markdown: what looks like a tag is text."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    return re.sub(r"(`[^`]*`)|<", lambda match: match[1] or "&lt;", text)


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]
