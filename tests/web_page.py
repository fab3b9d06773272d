"""What a browser finds in a page of HTML."""

import json
from html.parser import HTMLParser

VOID = {"meta", "input", "wbr", "br", "link", "img"}


class WebPage(HTMLParser):
    """The tags of a page, the text of each script, of each section and of all outside of scripts; comments."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.comments: list[str] = []
        self.sections: dict[str, str] = {"": ""}
        self.open: list[str] = []
        self._section = ""
        self.feed(text)
        self.close()
        self.sections = {key: " ".join(item.split()) for key, item in self.sections.items()}

    @property
    def text(self) -> str:
        return " ".join(self.sections.values()).strip()

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "section":
            self._section = dict(attrs).get("aria-labelledby") or ""
            self.sections.setdefault(self._section, "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.sections[self._section] += data + " "

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)
