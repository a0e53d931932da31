"""Process that checks batch files for ``neaptide_vllm.batches.plugin``; see ``server.batches.checking.worker``."""

import msgspec

from neaptide.server.batches.checking.worker import serve
from neaptide_vllm.batches.bodies import BodyCompiler

MODULE = "neaptide_vllm.batches.checking"

if __name__ == "__main__":
    serve(msgspec.msgpack.Decoder(BodyCompiler), lambda recipe: recipe)
