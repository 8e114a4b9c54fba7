// The DAG runtime: three separate pools (permits, contexts, runners), request slots, deadlines, completions.
//
// A request moves  free -> filling -> waiting (no permit yet) | admitted -> running -> done -> free.
// Every request that leaves `filling` ends in exactly one completion.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "context.h"
#include "dagserve/plan.h"
#include "request_decoder.h"

namespace dagserve {

constexpr std::size_t kLongestRequestId = 128;

// One request: its inputs and response at capacity, reused for ever.
struct Slot {
  enum class State : std::uint8_t { free, filling, waiting, admitted, running, done };

  std::vector<Tensor> inputs;
  std::unique_ptr<char[]> body;  // JSON that a context decodes into the inputs; with kBodyPadding behind it
  std::size_t body_bytes = 0;
  int endpoint = -1;  // whose body it is; -1: the inputs are filled already
  std::array<char, kLongestRequestId> request_id;
  std::size_t request_id_bytes = 0;  // 0: the request has none, and no time of arrival either
  Tensor response;
  Status status;
  State state = State::free;
  bool permit = false;    // holds an in_flight permit
  bool blocking = false;  // a thread waits in run()
  std::atomic<bool> cancelled{false};
  std::uint32_t generation = 0;
  Clock::time_point deadline;
  Clock::time_point patience;  // when waiting for a permit ends
  int previous = -1;           // in its list
  int next = -1;
  std::condition_variable finished;
  std::function<void(const Context&)> trace;  // tests only
};

// A list of slots linked through the slots themselves.
struct SlotList {
  int head = -1;
  int tail = -1;
  int size = 0;
};

struct Counters {
  std::int64_t admitted = 0;   // got a permit
  std::int64_t completed = 0;  // replied with a result
  std::int64_t invalid = 0;    // refused: the request itself is wrong
  std::int64_t failed = 0;     // ended in an error of a node
  std::int64_t rejected = 0;   // no place, or no permit within the wait
  std::int64_t expired = 0;    // deadline passed before the device
  std::int64_t cancelled = 0;  // caller left before the device
};

struct TierStats {
  int capacity = 0;
  int used = 0;
  int waiting = 0;
};

struct Stats {
  Counters counters;
  TierStats in_flight;
  TierStats contexts;
  std::vector<TierStats> runners;              // by package
  std::int64_t allocations_between_nodes = 0;  // on context threads, outside nodes
  std::int64_t decoded = 0;                    // bodies
  std::int64_t decode_nanoseconds = 0;
};

using Ticket = std::uint64_t;

class Runtime {
 public:
  // Loads everything the plan names and starts the context threads. Throws std::runtime_error or std::invalid_argument.
  Runtime(Plan plan, std::vector<EndpointSpec> endpoints);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  ~Runtime();

  const Plan& plan() const { return loaded_.plan; }
  const LoadedPlan& loaded() const { return loaded_; }

  // Takes a slot, and a permit or a waiting place with it. Null with `status` set when there is none.
  Slot* reserve(Status& status) noexcept;
  // Gives a reserved slot back without running it.
  void abandon(Slot& slot) noexcept;
  // The endpoint of that name, or -1.
  int endpoint(std::string_view name) const noexcept;
  // Gives a slot a body of at most body_limit(plan()) bytes; a context decodes it. With a request id, of which the
  // first kLongestRequestId bytes count, absent inputs called `request_id` (text) and `created` (i64) become the id and
  // the seconds since 1970.
  void set_body(Slot& slot, int endpoint, std::string_view body, std::string_view request_id) noexcept;
  // Starts a filled slot.
  Ticket start(Slot& slot, double deadline_s, bool blocking) noexcept;
  // Blocks until a slot started with `blocking` is done.
  void wait(Slot& slot) noexcept;
  // Gives a done slot back.
  void release(Slot& slot) noexcept;
  // Drops a request that has not reached the device. False when it is unknown or already done.
  bool cancel(Ticket ticket) noexcept;
  // Next finished request that nobody blocks on, or null. Its slot is released by the caller.
  Slot* next_completion() noexcept;
  Ticket ticket(const Slot& slot) const noexcept;

  int completion_fd() const { return event_; }
  Stats stats() const noexcept;
  std::size_t context_bytes() const { return Context::bytes(loaded_) + RequestDecoder::bytes(loaded_.plan); }
  std::size_t slot_bytes() const;
  std::size_t slot_count() const { return slots_.size(); }

  // Ends every request that has not started and joins the threads. Nothing may be started afterwards.
  void stop() noexcept;

  // Puts a cpu node created from other options in the place of the one of that name. Requests that run keep the one
  // they began with. Throws std::invalid_argument where there is no such node or the new one cannot be created or used;
  // then nothing has changed.
  void replace_node(std::string_view name, const std::string& options);

  // Takes no new requests and waits for the admitted ones. True when all ended in time.
  bool drain(double timeout_s) noexcept;

 private:
  void load();
  void make_slots();
  void serve_context(Context& context, RequestDecoder& decoder) noexcept;
  void decode(Slot& slot, RequestDecoder& decoder) noexcept;
  void identify(Slot& slot) noexcept;
  void watch_deadlines() noexcept;
  Clock::time_point expire(Clock::time_point now) noexcept;
  void expire_one(Slot& slot, Code code, const char* message) noexcept;
  void enqueue(Slot& slot) noexcept;
  void promote() noexcept;
  void finish(Slot& slot) noexcept;
  void count(const Status& status) noexcept;
  void push(SlotList& list, int index) noexcept;
  void remove(SlotList& list, int index) noexcept;
  int index_of(const Slot& slot) const noexcept;

  LoadedPlan loaded_;
  const std::vector<EndpointSpec> endpoints_;
  std::vector<std::unique_ptr<Context>> contexts_;
  std::vector<std::unique_ptr<RequestDecoder>> decoders_;  // one a context
  std::unique_ptr<Arena> slot_memory_;
  std::vector<std::unique_ptr<Slot>> slots_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable timer_;
  std::condition_variable idle_;
  SlotList free_;
  SlotList waiting_;
  SlotList admitted_;
  SlotList done_;
  int permits_ = 0;         // in_flight permits given out
  int waiting_places_ = 0;  // reserved or waiting without a permit
  int busy_contexts_ = 0;
  int unfinished_ = 0;  // reserved and not yet done
  bool draining_ = false;
  bool stopping_ = false;
  Counters counters_;
  std::int64_t allocations_ = 0;
  std::atomic<std::int64_t> decoded_{0};
  std::atomic<std::int64_t> decode_nanoseconds_{0};
  int event_ = -1;
  std::vector<std::thread> threads_;
};

}  // namespace dagserve
