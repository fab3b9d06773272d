"""What helps against each cause of lost time: the one table of it."""

HELPS = {
    "input": (
        "DataLoader(num_workers=2 to 8 per GPU, persistent_workers=True, prefetch_factor=2 or more)",
        "DataLoader(pin_memory=True) and .to(device, non_blocking=True): the copy then runs beside the computation",
        "tokenize, decode and resize once, before the loop",
    ),
    "synchronisation": (
        "take .item(), .cpu(), .tolist(), print() and `if tensor:` out of the loop; log every n-th step only",
        "add up losses and metrics on the device and fetch them at the end",
        'torch.cuda.set_sync_debug_mode("warn") names the lines that wait',
    ),
    "launch": (
        'torch.compile(model, mode="reduce-overhead"), or a CUDA graph, where shapes are fixed',
        "larger batches: as many launches do more work",
        "fused optimizers (fused=True), and less Python between the operators",
    ),
    "allocator": (
        "PYTORCH_ALLOC_CONF=expandable_segments:True (torch up to 2.9 heeds only PYTORCH_CUDA_ALLOC_CONF)",
        "no torch.cuda.empty_cache() in the loop",
        "run the longest batch first, so that the cache holds blocks large enough for all others",
    ),
    "compile": (
        "run every shape once before the part that counts",
        "pad to a few lengths, or torch.compile(dynamic=True); TORCH_LOGS=recompiles says why it compiles again",
        "keep the cache from run to run: TORCHINDUCTOR_CACHE_DIR on a disk that stays",
    ),
    "launch_latency": (
        'a CUDA graph, or torch.compile(mode="reduce-overhead"): many kernels follow one launch',
        "fewer and larger kernels: larger batches, fused operators",
    ),
    "stream_wait": (
        "see which stream is waited for (the trace in a viewer shows it), and begin its work sooner",
        "give copies and communication streams of their own, and wait only where their result is used",
    ),
    "untraced": (
        "record Python stacks (trace.stacks=true) or mark the program with torch.profiler.record_function",
        "see whether other processes use the cores or the device",
    ),
    "communication": (
        "overlap it with the backward pass: DistributedDataParallel with bucket_cap_mb tried at 10, 25 and 100, "
        "gradient_as_bucket_view=True; FSDP with prefetching",
        "communicate less: accumulate gradients under no_sync(), or compress them to bfloat16",
        "where ranks wait for one another, compare their traces: the slowest has the longest step of its own",
    ),
    "memcpy": (
        "copy from pinned memory with non_blocking=True, on a stream of its own",
        "leave on the device what the next step needs again, and convert types there",
    ),
}
HELPS_ON_HOST = {  # of a trace without work of a device: the cause lies between the operators
    "launch": (
        "torch.compile: fewer operators, and less Python between them",
        "larger batches: the same Python for more work",
        "the flame graph and stacks.txt name the Python lines",
    ),
}
HELPS_STAGES = {  # of a training loop, by what their time counts for
    "input": HELPS["input"],
    "transfer": HELPS["memcpy"],
    "communication": HELPS["communication"],
    "optimizer": (
        "fused=True (or foreach=True) in the optimizer; zero_grad(set_to_none=True), which is the default",
        "accumulate gradients over several batches: one update for all of them",
        "an optimizer with less state, where the memory for it is what takes the time",
    ),
    "under_utilised": (
        "log and save every n-th step only, and from another thread or process",
        "add up losses and metrics on the device; no .item() or print() in each step",
        "evaluate and save less often, or on part of the data",
    ),
    "compute": (
        "a larger batch, if memory allows: more work for each operator",
        "bfloat16 (torch.autocast) and torch.compile, each checked against the loss curve",
        "the table of operators (op_stats.csv) and the verdict on the trace say which operators to begin with",
    ),
    "inconclusive": (
        "mark more of the loop: with profiler.stage(name)",
        "look into the trace: what is between the stages there",
    ),
}


def on(cause: str, on_host: bool = False) -> tuple[str, ...]:
    """Return what helps against a cause of idling, exposed communication or exposed copies; () where nothing does."""
    return (HELPS_ON_HOST.get(cause) if on_host else None) or HELPS.get(cause, ())


def on_stages(bound: str) -> tuple[str, ...]:
    """Return what helps against the time of stages that count for `bound`; () where nothing does."""
    return HELPS_STAGES.get(bound, ())
