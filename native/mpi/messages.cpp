// Messages, and what completes them: waits and tests.
#include <utility>

#include "interpose.hpp"

namespace paceline::mpi {
namespace {

// The status of a call: the program's, or one of our own where it wants none and we do.
class Told {
 public:
  Told(Status* wanted, bool needed) noexcept
      : status_(needed && is_ignored(wanted) ? &own_ : wanted) {}
  Status* get() noexcept { return status_; }

 private:
  Status own_{};
  Status* status_;
};

template <class Bytes, class Real>
int send(int to, int tag, Comm comm, Bytes&& bytes, Real&& real) {
  Call call;
  if (!call.recorded() || to == proc_null) return real();
  const CommunicatorPointer communicator = communicator_of(comm);
  const Event event = message_event(*communicator, communicator->peer(to), tag, true, bytes());
  call.begin();
  call.enter(event);
  const int result = real();
  call.end_blocking(event);
  return result;
}

template <class Bytes, class Real>
int issue_send(int to, int tag, Comm comm, Request* request, Bytes&& bytes, Real&& real) {
  Call call;
  if (!call.recorded() || to == proc_null) return real();
  const CommunicatorPointer communicator = communicator_of(comm);
  Event event = message_event(*communicator, communicator->peer(to), tag, true, bytes());
  event.begin_ns = call.begin();
  const int result = real();
  if (result == success) issue(*request, {.event = event, .wildcard = nullptr});
  call.end_issue();
  return result;
}

template <class Bytes, class Real>
int prepare(bool sends, int peer, int tag, Comm comm, Request* request, Bytes&& bytes,
            Real&& real) {
  Call call;
  const int result = real();
  if (!call.recorded() || result != success || peer == proc_null) return result;
  const CommunicatorPointer communicator = communicator_of(comm);
  const std::int32_t global = !sends && peer == any_source ? any_peer : communicator->peer(peer);
  keep_template(*request, {communicator, global, tag, bytes(), sends});
  return result;
}

Issued issued_receive(Comm comm, int from, int tag) {
  const CommunicatorPointer communicator = communicator_of(comm);
  const std::int32_t peer = from == any_source ? any_peer : communicator->peer(from);
  Issued issued{.event = message_event(*communicator, peer, tag, false, 0), .wildcard = nullptr};
  if (from == any_source || tag == any_tag) issued.wildcard = communicator;
  return issued;
}

// Of a message that a probe has matched.
bool take_issued(Message message, Issued& issued) {
  Envelope envelope;
  if (!take_message(message, envelope)) return false;
  issued.event = message_event(*envelope.communicator, envelope.peer, envelope.tag, false, 0);
  return true;
}

template <class Real>
int exchange(Call& call, Comm comm, int to, int send_tag, std::uint64_t bytes, int from,
             int receive_tag, const Status* told, Real&& real) {
  const CommunicatorPointer communicator = communicator_of(comm);
  std::vector<Issued> both;
  if (to != proc_null) {
    const std::int32_t peer = communicator->peer(to);
    both.push_back({.event = message_event(*communicator, peer, send_tag, true, bytes),
                    .wildcard = nullptr});
  }
  if (from != proc_null) both.push_back(issued_receive(comm, from, receive_tag));
  const std::uint64_t begin_ns = call.begin();
  if (!both.empty()) call.enter(both.back().event);
  const int result = real();
  for (Issued& issued : both) issued.event.begin_ns = begin_ns;
  const bool arrived = result == success && (from == proc_null || received(both.back(), told));
  if (from != proc_null && !arrived) both.pop_back();
  call.end_waiting(both);
  return result;
}

// Takes what was pending at a request that is over now.
void take_completed(Request request, const Status* status, std::vector<Issued>& completed) {
  Issued issued;
  if (take(request, issued) && received(issued, status)) completed.push_back(std::move(issued));
}

// Calls what completes requests, and takes what `taken` finds completed then. A wait is over when
// they are; a test only looks.
template <class Real, class Taken>
int complete(Call& call, bool waits, Real&& real, Taken&& taken) {
  if (waits) call.begin();
  const int result = real();
  std::vector<Issued> completed;
  taken(completed);
  if (waits) {
    call.end_waiting(completed);
  } else {
    Call::end_test(completed);
  }
  return result;
}

// What a call for several requests needs of each: its handle, as the call changes it, and a status.
class Requests {
 public:
  Requests(int count, const Request* requests, Status* wanted) : statuses_(wanted) {
    bool any = false;
    for (int i = 0; i < count; ++i) {
      handles_.push_back(requests[i]);
      any = any || is_pending(requests[i]);
    }
    if (any && is_ignored(wanted)) {
      own_.resize(static_cast<std::size_t>(count));
      statuses_ = own_.data();
    }
  }
  Status* statuses() noexcept { return statuses_; }
  // Takes what was pending at request `index`, whose status is number `place`.
  void take_one(int index, int place, std::vector<Issued>& completed) {
    const Status* status = is_ignored(statuses_) ? statuses_ : statuses_ + place;
    take_completed(handles_[static_cast<std::size_t>(index)], status, completed);
  }
  void take_all(std::vector<Issued>& completed) {
    for (int i = 0; i < static_cast<int>(handles_.size()); ++i) take_one(i, i, completed);
  }

 private:
  std::vector<Request> handles_;
  std::vector<Status> own_;
  Status* statuses_;
};

}  // namespace

void Call::end_receive(Issued& issued, const Status* status, int result) {
  // A receive that failed, or was truncated, is a call that waited and brought nothing.
  if (result == success && received(issued, status)) {
    end_blocking(issued.event);
  } else {
    end_wait({});
  }
}

}  // namespace paceline::mpi

#define COUNT int
#define NAME(name) name
#include "messages.inc"
#undef COUNT
#undef NAME

#if PACELINE_MPI_ABI != PACELINE_OPENMPI  // whose libraries do not have them
#define COUNT Count
#define NAME(name) name##_c
#include "messages.inc"
#endif

namespace paceline::mpi {

INTERPOSE(MPI_Wait, (Request * request, Status* status), (request, told),
          Call call;
          const bool recorded = call.recorded() && is_pending(*request);
          Told own(status, recorded);
          told = own.get();
          if (!recorded) return real();
          const Request handle = *request;
          call.enter_pending(handle);
          return complete(call, true, real, [&](std::vector<Issued>& completed) {
            take_completed(handle, told, completed);
          });)

INTERPOSE(MPI_Test, (Request * request, int* flag, Status* status), (request, flag, told),
          Call call;
          const bool recorded = call.recorded() && is_pending(*request);
          Told own(status, recorded);
          told = own.get();
          if (!recorded) return real();
          const Request handle = *request;
          return complete(call, false, real, [&](std::vector<Issued>& completed) {
            if (*flag != 0) take_completed(handle, told, completed);
          });)

INTERPOSE(MPI_Waitall, (int n, Request* requests, Status* statuses), (n, requests, told),
          Call call;
          told = statuses;
          if (!call.recorded()) return real();
          Requests all(n, requests, statuses);
          told = all.statuses();
          for (int i = 0; i < n && !call.enter_pending(requests[i]); ++i) {
          }
          return complete(call, true, real, [&](std::vector<Issued>& completed) {
            all.take_all(completed);
          });)

INTERPOSE(MPI_Testall, (int n, Request* requests, int* flag, Status* statuses),
          (n, requests, flag, told),
          Call call;
          told = statuses;
          if (!call.recorded()) return real();
          Requests all(n, requests, statuses);
          told = all.statuses();
          return complete(call, false, real, [&](std::vector<Issued>& completed) {
            if (*flag != 0) all.take_all(completed);
          });)

INTERPOSE(MPI_Waitany, (int n, Request* requests, int* index, Status* status),
          (n, requests, index, told),
          Call call;
          Told own(status, call.recorded());
          told = own.get();
          if (!call.recorded()) return real();
          Requests all(n, requests, told);
          return complete(call, true, real, [&](std::vector<Issued>& completed) {
            if (*index != undefined) all.take_one(*index, 0, completed);
          });)

INTERPOSE(MPI_Testany, (int n, Request* requests, int* index, int* flag, Status* status),
          (n, requests, index, flag, told),
          Call call;
          Told own(status, call.recorded());
          told = own.get();
          if (!call.recorded()) return real();
          Requests all(n, requests, told);
          return complete(call, false, real, [&](std::vector<Issued>& completed) {
            if (*flag != 0 && *index != undefined) all.take_one(*index, 0, completed);
          });)

INTERPOSE(MPI_Waitsome, (int n, Request* requests, int* done, int* indices, Status* statuses),
          (n, requests, done, indices, told),
          Call call;
          told = statuses;
          if (!call.recorded()) return real();
          Requests all(n, requests, statuses);
          told = all.statuses();
          return complete(call, true, real, [&](std::vector<Issued>& completed) {
            for (int i = 0; i < *done; ++i) all.take_one(indices[i], i, completed);
          });)

INTERPOSE(MPI_Testsome, (int n, Request* requests, int* done, int* indices, Status* statuses),
          (n, requests, done, indices, told),
          Call call;
          told = statuses;
          if (!call.recorded()) return real();
          Requests all(n, requests, statuses);
          told = all.statuses();
          return complete(call, false, real, [&](std::vector<Issued>& completed) {
            for (int i = 0; i < *done; ++i) all.take_one(indices[i], i, completed);
          });)

INTERPOSE(MPI_Start, (Request * request), (request),
          Call call;
          if (call.recorded()) start_template(*request);
          return real();)

INTERPOSE(MPI_Startall, (int n, Request* requests), (n, requests),
          Call call;
          for (int i = 0; call.recorded() && i < n; ++i) start_template(requests[i]);
          return real();)

INTERPOSE(MPI_Request_free, (Request * request), (request),
          Call call;
          if (!call.recorded()) return real();
          const Request handle = *request;
          const int result = real();
          drop_template(handle);
          Issued issued;
          if (take(handle, issued) && issued.wildcard == nullptr) {  // nobody sees its end
            issued.event.flags |= completion_unknown;
            std::vector<Issued> completed;
            completed.push_back(std::move(issued));
            Call::end_test(completed);
          }
          return result;)

// A probe waits for the message that a receive will take.
INTERPOSE(MPI_Probe, (int from, int tag, Comm comm, Status* status), (from, tag, comm, told),
          Call call;
          Told own(status, call.recorded());
          told = own.get();
          if (!call.recorded() || from == proc_null) return real();
          call.begin();
          const int result = real();
          const Status& found = *told;
          if (result == success) call.end_wait(coming_event(comm, found.source, found.tag));
          return result;)

INTERPOSE(MPI_Mprobe, (int from, int tag, Comm comm, Message* message, Status* status),
          (from, tag, comm, message, told),
          Call call;
          Told own(status, call.recorded());
          told = own.get();
          if (!call.recorded() || from == proc_null) return real();
          call.begin();
          const int result = real();
          if (result != success) return result;
          const Status& found = *told;
          call.end_wait(coming_event(comm, found.source, found.tag));
          keep_probed(comm, *message, found.source, found.tag);
          return result;)

INTERPOSE(MPI_Improbe, (int from, int tag, Comm comm, int* flag, Message* message, Status* status),
          (from, tag, comm, flag, message, told),
          Call call;
          Told own(status, call.recorded());
          told = own.get();
          if (!call.recorded() || from == proc_null) return real();
          const int result = real();
          if (result != success || *flag == 0) return result;
          keep_probed(comm, *message, told->source, told->tag);
          return result;)

}  // namespace paceline::mpi
