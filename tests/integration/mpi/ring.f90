! The ring of ring.c in Fortran, by the module: each rank sends 8 * (rank + 1) bytes to the next.
program ring
  use mpi
  implicit none
  integer :: rank, ranks, next, previous, round, error, requests(2)
  integer :: statuses(MPI_STATUS_SIZE, 2)
  double precision :: in(64), out(64), total
  call MPI_Init(error)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, error)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks, error)
  next = mod(rank + 1, ranks)
  previous = mod(rank + ranks - 1, ranks)
  out = rank
  do round = 1, 10
    call MPI_Irecv(in, ranks, MPI_DOUBLE_PRECISION, previous, 7, MPI_COMM_WORLD, requests(1), error)
    call MPI_Isend(out, rank + 1, MPI_DOUBLE_PRECISION, next, 7, MPI_COMM_WORLD, requests(2), error)
    call MPI_Waitall(2, requests, statuses, error)
    call MPI_Allreduce(in(1), total, 1, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD, error)
  end do
  if (rank == 0) print *, 'sum', total
  call MPI_Finalize(error)
end program ring
