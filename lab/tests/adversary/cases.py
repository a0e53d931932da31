"""A small load that many tests begin with."""

from neaptide_lab.adversary.case import Case, Chats, Rows

CASE = Case(
    profile="a100-40g-llama-3.1-8b",
    ttft_s=1.0,
    tpot_s=0.05,
    duration_s=4.0,
    chats=(Chats(8, 0.3, 500, 10),),
    rows=(Rows(6, 1000, 20), Rows(6, 1000, 20, tenant=1)),
)
