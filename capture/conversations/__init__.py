"""Conversations on disk, read by row."""

from dspark.capture.conversations.rows import Conversations, open_conversations

__all__ = ["Conversations", "open_conversations"]
