"""Rollouts on SGLang: one or several engines, in this process or as servers over HTTP. No torch at import."""
