! The same by the module of Fortran 2008, whose handles are types.
program ring
  use mpi_f08
  implicit none
  integer :: rank, ranks, next, previous, round
  type(MPI_Request) :: requests(2)
  double precision :: in(64), out(64), total
  call MPI_Init()
  call MPI_Comm_rank(MPI_COMM_WORLD, rank)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks)
  next = mod(rank + 1, ranks)
  previous = mod(rank + ranks - 1, ranks)
  out = rank
  do round = 1, 10
    call MPI_Irecv(in, ranks, MPI_DOUBLE_PRECISION, previous, 7, MPI_COMM_WORLD, requests(1))
    call MPI_Isend(out, rank + 1, MPI_DOUBLE_PRECISION, next, 7, MPI_COMM_WORLD, requests(2))
    call MPI_Waitall(2, requests, MPI_STATUSES_IGNORE)
    call MPI_Allreduce(in(1), total, 1, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD)
  end do
  if (rank == 0) print *, 'sum', total
  call MPI_Finalize()
end program ring
