"""What helps against each kind of lost time, in a few words for a gain and at length for who wants to do it."""

from dataclasses import dataclass

from boundby.verdict import Bound


@dataclass(frozen=True)
class Remedy:
    """What helps against one kind of lost time."""

    fix: str | None  # in a few words; None: what it could gain is not known
    relieves: Bound | None  # the bound that it helps with; None where it names none
    steps: tuple[str, ...]  # what to try


# Of what a trace books the idle time of a device on, and of exposed communication and copies.
OF_CAUSES: dict[str, Remedy] = {
    "input": Remedy(
        "prepare the input ahead (DataLoader workers, prefetching, pinned memory)",
        "input",
        (
            "DataLoader(num_workers=2 to 8 per GPU, persistent_workers=True, prefetch_factor=2 or more)",
            "DataLoader(pin_memory=True) and .to(device, non_blocking=True): the copy then runs beside the computation",
            "tokenize, decode and resize once, before the loop",
        ),
    ),
    "synchronisation": Remedy(
        "take the waits for the device out of the loop (.item(), .cpu(), printing)",
        "launch",
        (
            "take .item(), .cpu(), .tolist(), print() and `if tensor:` out of the loop; log every n-th step only",
            "add up losses and metrics on the device and fetch them at the end",
            'torch.cuda.set_sync_debug_mode("warn") names the lines that wait',
        ),
    ),
    "launch": Remedy(
        "launch less and sooner (torch.compile, CUDA graphs, larger batches)",
        "launch",
        (
            'torch.compile(model, mode="reduce-overhead"), or a CUDA graph, where shapes are fixed',
            "larger batches: as many launches do more work",
            "fused optimizers (fused=True), and less Python between the operators",
        ),
    ),
    "allocator": Remedy(
        "keep memory in the allocator's cache (no empty_cache; expandable segments)",
        "launch",
        (
            "PYTORCH_ALLOC_CONF=expandable_segments:True (torch up to 2.9 heeds only PYTORCH_CUDA_ALLOC_CONF)",
            "no torch.cuda.empty_cache() in the loop",
            "run the longest batch first, so that the cache holds blocks large enough for all others",
        ),
    ),
    "compile": Remedy(
        "compile before the loop, and keep shapes fixed",
        "launch",
        (
            "run every shape once before the part that counts",
            "pad to a few lengths, or torch.compile(dynamic=True); TORCH_LOGS=recompiles says why it compiles again",
            "keep the cache from run to run: TORCHINDUCTOR_CACHE_DIR on a disk that stays",
        ),
    ),
    "launch_latency": Remedy(
        "launch many kernels at once (CUDA graphs)",
        "launch",
        (
            'a CUDA graph, or torch.compile(mode="reduce-overhead"): many kernels follow one launch',
            "fewer and larger kernels: larger batches, fused operators",
        ),
    ),
    "stream_wait": Remedy(
        "order the streams so that the device need not wait for an event",
        "communication",
        (
            "see which stream is waited for (the trace in a viewer shows it), and begin its work sooner",
            "give copies and communication streams of their own, and wait only where their result is used",
        ),
    ),
    "untraced": Remedy(
        None,
        None,
        (
            "record Python stacks (with_stack), or mark the program with torch.profiler.record_function",
            "see whether other processes use the cores or the device",
        ),
    ),
    "communication": Remedy(
        "hide communication behind computation",
        "communication",
        (
            "overlap it with the backward pass: DistributedDataParallel with bucket_cap_mb tried at 10, 25 and "
            "100, gradient_as_bucket_view=True; FSDP with prefetching",
            "communicate less: accumulate gradients under no_sync(), or compress them to bfloat16",
            "where ranks wait for one another, compare their traces: the slowest has the longest step of its own",
        ),
    ),
    "memcpy": Remedy(
        "copy from pinned memory without blocking, beside the computation",
        "transfer",
        (
            "copy from pinned memory with non_blocking=True, on a stream of its own",
            "leave on the device what the next step needs again, and convert types there",
        ),
    ),
}
# Of a trace without work of a device: the cause lies between the operators.
OF_CAUSES_ON_HOST: dict[str, Remedy] = {
    "launch": Remedy(
        "do less between the operators (torch.compile, less Python in the loop)",
        "launch",
        (
            "torch.compile: fewer operators, and less Python between them",
            "larger batches: the same Python for more work",
            "the flame graph and stacks.txt name the Python lines",
        ),
    ),
}
# Of the stages of a training loop, by what their time counts for.
OF_STAGES: dict[Bound, Remedy] = {
    "input": Remedy(
        "prepare the input ahead (DataLoader workers, prefetching)",
        "input",
        OF_CAUSES["input"].steps,
    ),
    "transfer": Remedy(
        "copy the next batch while this one computes (pinned memory, non_blocking)",
        "transfer",
        OF_CAUSES["memcpy"].steps,
    ),
    "communication": OF_CAUSES["communication"],
    "optimizer": Remedy(
        "make the update cheaper (fused or foreach optimizer) or rarer (accumulate gradients)",
        "optimizer",
        (
            "fused=True (or foreach=True) in the optimizer; zero_grad(set_to_none=True), which is the default",
            "accumulate gradients over several batches: one update for all of them",
            "an optimizer with less state, where the memory for it is what takes the time",
        ),
    ),
    "under_utilised": Remedy(
        "do callbacks, logging and checkpoints less often, or beside the loop",
        "under_utilised",
        (
            "log and save every n-th step only, and from another thread or process",
            "add up losses and metrics on the device; no .item() or print() in each step",
            "evaluate and save less often, or on part of the data",
        ),
    ),
    "compute": Remedy(
        None,
        None,
        (
            "a larger batch, if memory allows: more work for each operator",
            "bfloat16 (torch.autocast) and torch.compile, each checked against the loss curve",
            "the table of operators (op_stats.csv) and the verdict on the trace say which operators to begin with",
        ),
    ),
    "inconclusive": Remedy(
        None,
        None,
        (
            "mark more of the loop: with profiler.stage(name)",
            "look into the trace: what is between the stages there",
        ),
    ),
}


def of_cause(cause: str, on_host: bool = False) -> Remedy | None:
    """Return what helps against a cause of idling, exposed communication or exposed copies; None where nothing does."""
    return (OF_CAUSES_ON_HOST.get(cause) if on_host else None) or OF_CAUSES.get(cause)
