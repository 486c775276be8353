"""Tensors to bytes and back."""

from __future__ import annotations
