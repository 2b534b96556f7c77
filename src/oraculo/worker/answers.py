"""What a handler says. How it is written is in `core.answer_writer`, which the bridges use too."""

from oraculo.core.answer_writer import MAX_ERROR_TEXT, Answer, AnswerWriter, describe

__all__ = ["MAX_ERROR_TEXT", "Answer", "AnswerWriter", "DoNotRetry", "describe"]


class DoNotRetry(Exception):
    """Raised by a handler: it failed, and would fail again. The orchestrator makes no further attempt."""
