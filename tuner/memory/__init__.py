"""Memory of one rank: dry run of real Megatron-Core, layer profiles, allocator."""
