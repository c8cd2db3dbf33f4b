# SPDX-License-Identifier: Apache-2.0
# MPI, if it is here (MPI_CXX_FOUND), and how its programs are started: ${mpirun} RANKS program arguments. Included by the
# CMakeLists of examples/parallel/ and tests/.
find_package(MPI QUIET COMPONENTS CXX)
set(mpi_packages "libopenmpi-dev openmpi-bin") # Debian's names
# More ranks than cores, as root, in a container.
set(mpi_flags --oversubscribe --allow-run-as-root --mca mpi_yield_when_idle 1
    --mca btl_vader_single_copy_mechanism none)
set(mpirun ${MPIEXEC_EXECUTABLE} ${mpi_flags} ${MPIEXEC_NUMPROC_FLAG})
