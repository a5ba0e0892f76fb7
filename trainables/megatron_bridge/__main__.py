"""Entry point of one rank."""

from trainables.megatron_bridge.rank import main

if __name__ == "__main__":
    main()
