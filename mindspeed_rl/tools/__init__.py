"""Tools for agents: the tools of a run's tool file, the parsers that read calls from a turn, and environments.

`interface.py` is the interface for agent loops. Importing this package loads only the registries. A new built-in tool is one
class and one line below; your own is a function or a class in the tool file.
"""

from __future__ import annotations

TOOLS: dict[str, str] = {
    "calculator": "mindspeed_rl.tools.calculator:Calculator",
    "code_interpreter": "mindspeed_rl.tools.code_interpreter:CodeInterpreter",
    "finish": "mindspeed_rl.tools.finish:Finish",
    "sandbox": "mindspeed_rl.tools.sandbox_tool:SandboxTool",
    "search": "mindspeed_rl.tools.search:Search",
}
"""Built-in tools: name -> class with the arguments (config, schema, settings, where)."""

FOREIGN_CLASSES: dict[str, str] = {
    "mindspeed_rl.tools.retool.ReTool": "code_interpreter",
    "mindspeed_rl.tools.sandbox_fusion_tool.SandboxFusionTool": "code_interpreter",
    "mindspeed_rl.tools.sandbox_fusion_tools.SandboxFusionTool": "code_interpreter",
    "mindspeed_rl.tools.search_tool.SearchTool": "search",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "code_interpreter",
    "verl.tools.search_tool.SearchTool": "search",
}
"""Classes of other projects -> the built-in tool that replaces them."""
