"""What the words of an analysis mean, for people (docs/traces.md says it at length), and kernels by short names."""

import re

from boundby.formatting import clean

BOUNDS = {
    "compute": "the device is busy with matmuls, convolutions and attention",
    "memory": "the device is busy with memory-bound kernels",
    "launch": "the device waits for the host: dispatch, Python, synchronisation, allocator or compiler",
    "input": "the device waits for the input pipeline",
    "transfer": "the device is busy with copies that nothing overlaps",
    "communication": "the device is busy with communication that nothing overlaps",
    "optimizer": "the device is busy with optimizer steps",
    "under_utilised": "the device is busy with kernels too small to fill it",
    "mixed": "no single cause stands out",
    "inconclusive": "nothing can be concluded from this trace",
}
HOST_BOUNDS = {  # of a trace without work of a device
    "compute": "the host is busy with matmuls, convolutions and attention",
    "memory": "the host is busy with memory-bound operators",
    "launch": "the host is mostly outside of operators: Python, and what lies between them",
    "input": "the host waits for the input pipeline",
}
KINDS = {
    "compute": "compute",
    "communication": "communication",
    "memcpy": "copies",
    "memset": "memset",
    "operators": "operators",
}
CAUSES = {
    "input": "waiting for the next batch of the DataLoader",
    "synchronisation": "waiting for the device (.item(), .cpu(), synchronize), and launching what the wait held up",
    "launch": "dispatch: operators, kernel launches, and the Python between them",
    "allocator": "allocating or freeing device memory",
    "compile": "compiling kernels",
    "launch_latency": "from the launch to the start of the kernel; the host was in time",
    "stream_wait": "waiting for an event of another stream",
    "untraced": "unexplained: no host event, or a kernel without its launch",
    "python": "the program's own Python, in stretches longer than between two operators",
    "tokenizing": "tokenizing texts",
    "garbage_collection": "Python's garbage collector",
    "saving": "writing checkpoints and other files",
    "loading": "starting the device, or loading a kernel at its first use",
    "driver": "launches that the driver blocked, mostly for a call of another thread",
    "graph_pause": "pauses between the kernels of one CUDA graph",
}
HOST_CAUSES = {  # of a trace without work of a device, where idle is time outside of all operators
    "launch": "Python and other calls between the operators",
    "untraced": "outside all recorded events: Python without a name, or threads that were not recorded",
}
DEMANGLED = re.compile(r"[<(:]")
NAMESPACE = re.compile(r"(?:\b\w+|\(anonymous namespace\)|\{anonymous\}|<unnamed>)::")
CALL = re.compile(r"\s*\([^()]*(?:\([^()]*\)[^()]*)*\)(?:\s*\[clone[^\]]*\])?$")  # the parameters at the end
QUALIFIERS = re.compile(r"^(?:void|static|__global__)\s+")
AGAIN = re.compile(r"\b(?!true|false)([A-Za-z]\w*)(?:, \1\b)+")  # float, float, float
CLOSING = re.compile(r"\s+>")


def bound(name: str, on_host: bool = False) -> str:
    """Return what the device, or without one the host, spends its time on."""
    return (HOST_BOUNDS.get(name) if on_host else None) or BOUNDS[name]


def cause(name: str, on_host: bool = False) -> str:
    """Return what the host or the device was at meanwhile."""
    return (HOST_CAUSES.get(name) if on_host else None) or CAUSES[name]


def plain(name: str) -> str:
    """Return a kind of work or a cause as a person writes it."""
    return KINDS.get(name, name.replace("_", " "))


def kernel(name: str, longest: int) -> str:
    """Return the name without return type, namespaces and parameters; the end of its template arguments may be cut.

    A name that is not C++, as of a copy or of Triton, keeps both of its ends.
    """
    if name.startswith(("Memcpy", "Memset")) or not DEMANGLED.search(name):
        return clean(name, longest)
    text = NAMESPACE.sub("", QUALIFIERS.sub("", clean(name, longest=10_000)))
    text = CLOSING.sub(">", CALL.sub("", text)) or name
    text = AGAIN.sub(r"\1", text)
    if text.startswith("Kernel<"):  # cutlass::Kernel<the name proper>
        text = text.removeprefix("Kernel<").removesuffix(">")
    if "<" not in text:
        return clean(text, longest)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
