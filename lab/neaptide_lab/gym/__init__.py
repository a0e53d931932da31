"""The gym: one policy on seven loads, three devices and three seeds, beside the bound and every rival."""
