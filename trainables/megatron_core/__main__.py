"""Entry point of one rank."""

from trainables.megatron_core.rank import main

if __name__ == "__main__":
    main()
