"""What each CLI command does, one file a command; the output contract of scripts lives here."""
