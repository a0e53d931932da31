"""Makes ``lab.tests`` and ``lab.benchmarks`` packages of the clone; what is installed is ``neaptide_lab``."""
