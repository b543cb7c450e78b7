"""Adapters for schedulers of other engines: from what they plan to the columns of this runtime.

    tokenspeed  a forward op of tokenspeed-scheduler, old (`occupied_pages, begins, sizes`) or new (tables of a cache group)
    vllm        a `SchedulerOutput` of vLLM v1
    sglang      writes into a token-level `req_to_token`

None of them imports the stack it adapts: they read attributes, and an object without one of them is told so by name.
"""
