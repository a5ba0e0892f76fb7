"""Entry point of the process that runs the command."""

from trainables.command.process import main

if __name__ == "__main__":
    main()
