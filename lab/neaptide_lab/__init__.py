"""Neaptide's laboratory: experiments on the papers, and the policies that they compare."""
