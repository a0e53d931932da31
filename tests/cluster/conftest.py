"""Fixtures that the tests of a cluster share with those of one server."""

from tests.server.conftest import forms_of_replies, loop_clock, patient_with_grammars, server, tokenizer

__all__ = ["forms_of_replies", "loop_clock", "patient_with_grammars", "server", "tokenizer"]
