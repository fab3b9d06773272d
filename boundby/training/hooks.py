"""What a user wants to be told of while a profiled loop runs."""

from collections.abc import Callable
from typing import Any, Literal, get_args

from boundby.training.remarks import Remarks

Event = Literal["stage_start", "excluded_start", "stage_end", "step_end", "trace_ready"]


class Hooks:
    """Calls what was registered for an event; a hook that raises is taken out, and a remark says so."""

    def __init__(self, remarks: Remarks) -> None:
        self._remarks = remarks
        self.watch_stages = False  # is told of stages or steps as they happen
        self._hooks: dict[str, list[Callable[..., object]]] = {event: [] for event in get_args(Event)}

    def register(self, event: Event, hook: Callable[..., object]) -> None:
        """Call `hook` at each `event` from now on. Raises ValueError for an event that there is not."""
        if event not in self._hooks:
            raise ValueError(f"there is no event {event!r}; there are {', '.join(self._hooks)}")
        self._hooks[event].append(hook)
        self._note_listeners()

    def unregister(self, event: Event, hook: Callable[..., object]) -> None:
        """Call `hook` no more; nothing happens where it was not called."""
        if hook in self._hooks[event]:
            self._hooks[event].remove(hook)
        self._note_listeners()

    def tell(self, event: Event, *what: Any) -> None:
        """Call the hooks of an event."""
        for hook in list(self._hooks[event]):
            try:
                hook(*what)
            except Exception as error:
                self._hooks[event].remove(hook)
                self._remarks.add(f"hook of {event}", error)

    def _note_listeners(self) -> None:
        self.watch_stages = any(hooks for event, hooks in self._hooks.items() if event != "trace_ready")
