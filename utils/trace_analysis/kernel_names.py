"""C++ names of kernels, cut down to what a person recognises them by."""

import re

from utils.render.formatting import clean

DEMANGLED = re.compile(r"[<(:]")
NAMESPACE = re.compile(r"(?:\b\w+|\(anonymous namespace\)|\{anonymous\}|<unnamed>)::")
CALL = re.compile(r"\s*\([^()]*(?:\([^()]*\)[^()]*)*\)(?:\s*\[clone[^\]]*\])?$")  # the parameters at the end
WORDS = re.compile(r"^(?:void|static|__global__)\s+")
AGAIN = re.compile(r"\b(?!true|false)([A-Za-z]\w*)(?:, \1\b)+")  # float, float, float
CLOSING = re.compile(r"\s+>")


def short(name: str, longest: int) -> str:
    """Return the name without return type, namespaces and parameters; the end of its template arguments may be cut.

    A name that is not C++, as of a copy or of Triton, keeps both of its ends.
    """
    if name.startswith(("Memcpy", "Memset")) or not DEMANGLED.search(name):
        return clean(name, longest)
    text = WORDS.sub("", clean(name, longest=10_000))
    text = NAMESPACE.sub("", text)
    text = CLOSING.sub(">", CALL.sub("", text)) or name
    text = AGAIN.sub(r"\1", text)
    if text.startswith("Kernel<"):  # cutlass::Kernel<the name proper>
        text = text.removeprefix("Kernel<").removesuffix(">")
    if "<" not in text:
        return clean(text, longest)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
