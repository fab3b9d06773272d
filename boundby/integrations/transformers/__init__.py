"""The Hugging Face Trainer: `ProfCallback` times the stages of its steps and records a few of them."""

from boundby.integrations.transformers.callback import ProfCallback
from boundby.integrations.transformers.stages import Attachment

__all__ = ["Attachment", "ProfCallback"]
