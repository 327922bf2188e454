"""Tools for agents: what a run's tool file names, the parsers that read calls out of a turn, and environments.

`interface.py` is what an agent loop sees. Importing this package loads the registries alone. A new built-in tool is one class
and one line below; a user's own is a function or a class that the tool file names.
"""

from __future__ import annotations

TOOLS: dict[str, str] = {
    "calculator": "mindspeed_rl.tools.calculator:Calculator",
    "code_interpreter": "mindspeed_rl.tools.code_interpreter:CodeInterpreter",
    "finish": "mindspeed_rl.tools.finish:Finish",
    "search": "mindspeed_rl.tools.search:Search",
}
"""Built-in tools: name -> class that is made of (config, schema, settings, where)."""

FOREIGN_CLASSES: dict[str, str] = {
    "mindspeed_rl.tools.retool.ReTool": "code_interpreter",
    "mindspeed_rl.tools.sandbox_fusion_tool.SandboxFusionTool": "code_interpreter",
    "mindspeed_rl.tools.sandbox_fusion_tools.SandboxFusionTool": "code_interpreter",
    "mindspeed_rl.tools.search_tool.SearchTool": "search",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "code_interpreter",
    "verl.tools.search_tool.SearchTool": "search",
}
"""Classes of other projects whose place a built-in tool takes."""
