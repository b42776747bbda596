// The beginning and the end of MPI, marks of steps, and communicators.
#include "interpose.hpp"

namespace paceline::mpi {

INTERPOSE(MPI_Init, (int* argc, char*** argv), (argc, argv),
          Call call;
          const int result = real();
          if (call.is_outermost() && result == success) start();
          return result;)

INTERPOSE(MPI_Init_thread, (int* argc, char*** argv, int required, int* provided),
          (argc, argv, required, provided),
          Call call;
          const int result = real();
          if (call.is_outermost() && result == success) start();
          return result;)

INTERPOSE(MPI_Finalize, (), (),
          Call call;
          if (!call.recorded()) return real();
          end_run();
          call.begin();  // it may wait for ranks that have not come to their end
          const int result = real();
          stop();
          return result;)

INTERPOSE(MPI_Abort, (Comm comm, int code), (comm, code),
          stop();  // before it ends the process
          return real();)

// MPI leaves the meaning of levels to tools: 1 ends a step, as paceline.step() does.
PACELINE_EXPORT int MPI_Pcontrol(const int level, ...) {
  static Next<int(int, ...)> next("MPI_Pcontrol");
  Call call;
  if (call.recorded() && level == 1) end_step();
  return next.get()(level);
}
PACELINE_EXPORT int PMPI_Pcontrol(const int level, ...) {
  static Next<int(int, ...)> next("PMPI_Pcontrol");
  Call call;
  if (call.recorded() && level == 1) end_step();
  return next.get()(level);
}

namespace {

// Calls what makes a communicator of another one, a collective of its parent.
template <class Real>
int make(Comm parent, Comm* child, const char* word, Real&& real) {
  Call call;
  if (!call.recorded()) return real();
  const CommunicatorPointer from = communicator_of(parent);
  const Event event = collective_event(*from, Operation::make_communicator, no_root, 0);
  call.begin();
  call.enter(event);
  const int result = real();
  call.end_blocking(event);
  if (result == success) made(parent, *child, word);
  return result;
}

}  // namespace

INTERPOSE(MPI_Comm_dup, (Comm comm, Comm* child), (comm, child),
          return make(comm, child, "dup", real);)
INTERPOSE(MPI_Comm_dup_with_info, (Comm comm, Info info, Comm* child), (comm, info, child),
          return make(comm, child, "dup", real);)
INTERPOSE(MPI_Comm_split, (Comm comm, int color, int key, Comm* child), (comm, color, key, child),
          return make(comm, child, "split", real);)
INTERPOSE(MPI_Comm_split_type, (Comm comm, int type, int key, Info info, Comm* child),
          (comm, type, key, info, child), return make(comm, child, "split", real);)
INTERPOSE(MPI_Comm_create, (Comm comm, Group group, Comm* child), (comm, group, child),
          return make(comm, child, "create", real);)
INTERPOSE(MPI_Cart_create,
          (Comm comm, int n, const int* sizes, const int* periods, int reorder, Comm* child),
          (comm, n, sizes, periods, reorder, child), return make(comm, child, "cart", real);)
INTERPOSE(MPI_Cart_sub, (Comm comm, const int* remain, Comm* child), (comm, remain, child),
          return make(comm, child, "cart", real);)
INTERPOSE(MPI_Graph_create,
          (Comm comm, int n, const int* index, const int* edges, int reorder, Comm* child),
          (comm, n, index, edges, reorder, child), return make(comm, child, "graph", real);)
INTERPOSE(MPI_Dist_graph_create_adjacent,
          (Comm comm, int in, const int* sources, const int* in_weights, int out,
           const int* destinations, const int* out_weights, Info info, int reorder, Comm* child),
          (comm, in, sources, in_weights, out, destinations, out_weights, info, reorder, child),
          return make(comm, child, "graph", real);)
INTERPOSE(MPI_Dist_graph_create,
          (Comm comm, int n, const int* sources, const int* degrees, const int* destinations,
           const int* weights, Info info, int reorder, Comm* child),
          (comm, n, sources, degrees, destinations, weights, info, reorder, child),
          return make(comm, child, "graph", real);)
INTERPOSE(MPI_Intercomm_merge, (Comm comm, int high, Comm* child), (comm, high, child),
          return make(comm, child, "merge", real);)

// The new communicator has no members before its request is complete: its first use describes it.
INTERPOSE(MPI_Comm_idup, (Comm comm, Comm* child, Request* request), (comm, child, request),
          Call call;
          const int result = real();
          if (call.recorded() && result == success) count_child(comm);
          return result;)

INTERPOSE(MPI_Comm_create_group, (Comm comm, Group group, int tag, Comm* child),
          (comm, group, tag, child),
          Call call;
          const int result = real();
          if (call.recorded() && result == success) {
            made_by_members(communicator_of(comm)->name + " group", *child, tag);
          }
          return result;)

INTERPOSE(MPI_Intercomm_create,
          (Comm comm, int leader, Comm peers, int remote_leader, int tag, Comm* child),
          (comm, leader, peers, remote_leader, tag, child),
          Call call;
          const int result = real();
          if (call.recorded() && result == success) {
            made_by_members("MPI intercommunicator", *child, tag);
          }
          return result;)

INTERPOSE(MPI_Comm_free, (Comm * comm), (comm),
          Call call;
          if (call.recorded()) forget(*comm);
          return real();)
INTERPOSE(MPI_Comm_disconnect, (Comm * comm), (comm),
          Call call;
          if (call.recorded()) forget(*comm);
          return real();)

}  // namespace paceline::mpi
