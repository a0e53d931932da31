"""Paths of the generation endpoints."""

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES)
