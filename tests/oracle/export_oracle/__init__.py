"""Applies exported settings to the real packages and says what they then hold."""
