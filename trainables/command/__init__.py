"""Any program as a trial: a launch command with placeholders, and patterns that read its output."""
