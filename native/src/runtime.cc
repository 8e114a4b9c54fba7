#include "runtime.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <stdexcept>

#include "allocations.h"

namespace dagserve {

namespace {

std::vector<std::int32_t> iota_of(const NodeSpec& node) {
  std::int64_t bound = 0;
  for (const CallSpec& call : node.calls)
    for (const Operand& operand : call.inputs)
      if (operand.kind == Operand::Kind::iota || operand.kind == Operand::Kind::count)
        bound = std::max({bound, operand.bound, operand.at_most_default == INT64_MAX ? 0 : operand.at_most_default});
  std::vector<std::int32_t> values(static_cast<std::size_t>(bound));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int32_t>(i);
  return values;
}

std::shared_ptr<const LoadedCpuNode> load_cpu_node(const NodeSpec& spec, const NodeConfig& config) {
  try {
    const dagserve_cpu_node& type = spec.foreign ? *spec.foreign : find_cpu_node(spec.config.op, spec.library);
    return std::make_shared<const LoadedCpuNode>(type, config);
  } catch (const std::exception& error) {
    throw std::invalid_argument("node " + spec.name + ": " + error.what());
  }
}

Clock::time_point after(double seconds) {
  constexpr double kLongest = 1e9;  // seconds; keeps the clock from overflowing
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, kLongest)));
}

}  // namespace

Runtime::Runtime(Plan plan, std::vector<EndpointSpec> endpoints) : endpoints_(std::move(endpoints)) {
  loaded_.plan = std::move(plan);
  validate(loaded_.plan);
  load();
  make_slots();
  event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (event_ < 0) throw std::runtime_error("[load] cannot create an eventfd");
  for (int i = 0; i < loaded_.plan.contexts; ++i) {
    contexts_.push_back(std::make_unique<Context>(loaded_));
    decoders_.push_back(std::make_unique<RequestDecoder>(loaded_.plan, endpoints_));
  }
  for (std::size_t i = 0; i < contexts_.size(); ++i)
    threads_.emplace_back([this, i] { serve_context(*contexts_[i], *decoders_[i]); });
  threads_.emplace_back([this] { watch_deadlines(); });
}

void Runtime::load() {
  const Plan& plan = loaded_.plan;
  if (!plan.packages.empty()) {
    loaded_.weights = std::make_unique<MappedFile>(plan.root + "/" + plan.weights_path, plan.weights_bytes);
    for (const PackageSpec& spec : plan.packages)
      loaded_.packages.push_back(std::make_unique<Package>(plan, spec, *loaded_.weights));
  }
  loaded_.schedule = make_schedule(plan);
  for (const NodeSpec& spec : plan.nodes) {
    auto node = std::make_unique<LoadedNode>();
    node->spec = &spec;
    if (!spec.aoti) node->cpu = load_cpu_node(spec, spec.config);
    node->iota = iota_of(spec);
    loaded_.nodes.push_back(std::move(node));
  }
}

std::size_t Runtime::slot_bytes() const {
  const Plan& plan = loaded_.plan;
  std::size_t bytes = tensor_bytes(plan, plan.tensors[plan.response]);
  for (const InputSpec& input : plan.inputs) bytes += tensor_bytes(plan, plan.tensors[input.tensor]);
  return bytes;  // the body's buffer is not counted: pages of it that no body reaches take no memory
}

void Runtime::make_slots() {
  const Plan& plan = loaded_.plan;
  // One slot a permit and a waiting place, and one more a permit for replies not yet fetched.
  const int count = 2 * plan.in_flight + plan.max_queued;
  slot_memory_ = std::make_unique<Arena>(slot_bytes() * static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    auto slot = std::make_unique<Slot>();
    for (const InputSpec& input : plan.inputs)
      slot->inputs.push_back(make_tensor(plan, plan.tensors[input.tensor], *slot_memory_));
    slot->body = std::make_unique_for_overwrite<char[]>(body_limit(plan) + kBodyPadding);
    slot->response = make_tensor(plan, plan.tensors[plan.response], *slot_memory_);
    slots_.push_back(std::move(slot));
    push(free_, i);
  }
}

Runtime::~Runtime() {
  stop();
  if (event_ >= 0) close(event_);
}

void Runtime::stop() noexcept {
  {
    std::lock_guard lock(mutex_);
    draining_ = stopping_ = true;
    for (SlotList* list : {&waiting_, &admitted_}) {
      while (list->head >= 0) {
        Slot& slot = *slots_[list->head];
        remove(*list, list->head);
        slot.status.fail(Code::draining, "the runtime is shutting down");
        finish(slot);
      }
    }
  }
  work_.notify_all();
  timer_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Runtime::push(SlotList& list, int index) noexcept {
  Slot& slot = *slots_[index];
  slot.previous = list.tail;
  slot.next = -1;
  (list.tail < 0 ? list.head : slots_[list.tail]->next) = index;
  list.tail = index;
  ++list.size;
}

void Runtime::remove(SlotList& list, int index) noexcept {
  Slot& slot = *slots_[index];
  (slot.previous < 0 ? list.head : slots_[slot.previous]->next) = slot.next;
  (slot.next < 0 ? list.tail : slots_[slot.next]->previous) = slot.previous;
  slot.previous = slot.next = -1;
  --list.size;
}

int Runtime::index_of(const Slot& slot) const noexcept {
  for (std::size_t i = 0; i < slots_.size(); ++i)
    if (slots_[i].get() == &slot) return static_cast<int>(i);
  return -1;
}

Ticket Runtime::ticket(const Slot& slot) const noexcept {
  return (std::uint64_t{slot.generation} << 32) | static_cast<std::uint64_t>(index_of(slot));
}

Slot* Runtime::reserve(Status& status) noexcept {
  std::lock_guard lock(mutex_);
  if (draining_) {
    status.fail(Code::draining, "the service is draining and takes no new requests");
    return nullptr;
  }
  const bool permit = permits_ < loaded_.plan.in_flight && waiting_places_ == 0;
  if (free_.head < 0 || (!permit && waiting_places_ >= loaded_.plan.max_queued)) {
    ++counters_.rejected;
    status.fail(Code::overloaded, "%d requests are in flight and %d wait; try again later", permits_, waiting_places_);
    return nullptr;
  }
  const int index = free_.head;
  remove(free_, index);
  Slot& slot = *slots_[index];
  slot.state = Slot::State::filling;
  slot.permit = permit;
  slot.cancelled = false;
  slot.endpoint = -1;
  slot.status.clear();
  ++slot.generation;
  ++(permit ? permits_ : waiting_places_);
  ++unfinished_;
  return &slot;
}

void Runtime::abandon(Slot& slot) noexcept {
  std::lock_guard lock(mutex_);
  --(slot.permit ? permits_ : waiting_places_);
  --unfinished_;
  slot.state = Slot::State::free;
  push(free_, index_of(slot));
  promote();
  idle_.notify_all();
}

int Runtime::endpoint(std::string_view name) const noexcept {
  const auto found = std::ranges::find(endpoints_, name, &EndpointSpec::name);
  return found == endpoints_.end() ? -1 : static_cast<int>(found - endpoints_.begin());
}

void Runtime::set_body(Slot& slot, int endpoint, std::string_view body, std::string_view request_id) noexcept {
  std::memcpy(slot.body.get(), body.data(), body.size());
  std::memset(slot.body.get() + body.size(), 0, kBodyPadding);
  slot.body_bytes = body.size();
  slot.endpoint = endpoint;
  slot.request_id_bytes = request_id.copy(slot.request_id.data(), slot.request_id.size());
}

Ticket Runtime::start(Slot& slot, double deadline_s, bool blocking) noexcept {
  std::lock_guard lock(mutex_);
  slot.blocking = blocking;
  slot.deadline = after(deadline_s);
  slot.patience = std::min(slot.deadline, after(loaded_.plan.max_wait_s));
  const Ticket result = ticket(slot);
  if (stopping_) {
    slot.status.fail(Code::draining, "the runtime is shutting down");
    finish(slot);
  } else {
    enqueue(slot);
  }
  return result;
}

void Runtime::enqueue(Slot& slot) noexcept {
  const int index = index_of(slot);
  if (!slot.permit && waiting_.head < 0 && permits_ < loaded_.plan.in_flight) {
    slot.permit = true;
    ++permits_;
    --waiting_places_;
  }
  slot.state = slot.permit ? Slot::State::admitted : Slot::State::waiting;
  push(slot.permit ? admitted_ : waiting_, index);
  if (slot.permit) {
    ++counters_.admitted;
    work_.notify_one();
  }
  timer_.notify_one();
}

// Gives free permits to those who wait, oldest first.
void Runtime::promote() noexcept {
  while (waiting_.head >= 0 && permits_ < loaded_.plan.in_flight) {
    const int index = waiting_.head;
    remove(waiting_, index);
    Slot& slot = *slots_[index];
    slot.permit = true;
    ++permits_;
    --waiting_places_;
    slot.state = Slot::State::admitted;
    push(admitted_, index);
    ++counters_.admitted;
    work_.notify_one();
  }
}

void Runtime::count(const Status& status) noexcept {
  switch (status.code) {
    case Code::ok:
      ++counters_.completed;
      return;
    case Code::deadline_exceeded:
      ++counters_.expired;
      return;
    case Code::cancelled:
      ++counters_.cancelled;
      return;
    case Code::overloaded:
      ++counters_.rejected;
      return;
    case Code::invalid_request:
    case Code::unknown_model:
      ++counters_.invalid;
      return;
    default:
      ++counters_.failed;
  }
}

// The one place where a started request ends. Holds the mutex; the slot is in no list.
void Runtime::finish(Slot& slot) noexcept {
  --(slot.permit ? permits_ : waiting_places_);
  --unfinished_;
  slot.state = Slot::State::done;
  count(slot.status);
  if (slot.blocking) {
    slot.finished.notify_all();
  } else {
    push(done_, index_of(slot));
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = write(event_, &one, sizeof(one));
  }
  promote();
  idle_.notify_all();
}

void Runtime::wait(Slot& slot) noexcept {
  std::unique_lock lock(mutex_);
  slot.finished.wait(lock, [&] { return slot.state == Slot::State::done; });
}

void Runtime::release(Slot& slot) noexcept {
  std::lock_guard lock(mutex_);
  slot.state = Slot::State::free;
  slot.trace = nullptr;
  push(free_, index_of(slot));
}

Slot* Runtime::next_completion() noexcept {
  std::lock_guard lock(mutex_);
  if (done_.head < 0) {
    std::uint64_t seen = 0;
    [[maybe_unused]] const auto read_bytes = read(event_, &seen, sizeof(seen));
    return nullptr;
  }
  Slot& slot = *slots_[done_.head];
  remove(done_, done_.head);
  return &slot;
}

bool Runtime::cancel(Ticket ticket) noexcept {
  const auto index = static_cast<std::size_t>(ticket & 0xffffffff);
  std::lock_guard lock(mutex_);
  if (index >= slots_.size() || slots_[index]->generation != static_cast<std::uint32_t>(ticket >> 32)) return false;
  Slot& slot = *slots_[index];
  const bool waiting = slot.state == Slot::State::waiting;
  if (waiting || slot.state == Slot::State::admitted) {
    remove(waiting ? waiting_ : admitted_, static_cast<int>(index));
    slot.status.fail(Code::cancelled, "the caller left before the request started");
    finish(slot);
    return true;
  }
  if (slot.state != Slot::State::running) return false;
  slot.cancelled = true;
  return true;
}

void Runtime::decode(Slot& slot, RequestDecoder& decoder) noexcept {
  const Clock::time_point started = Clock::now();
  decoder.decode(slot.endpoint, {slot.body.get(), slot.body_bytes}, slot.inputs, slot.status);
  if (slot.status.ok() && slot.request_id_bytes > 0) identify(slot);
  decoded_.fetch_add(1, std::memory_order_relaxed);
  decode_nanoseconds_.fetch_add((Clock::now() - started).count(), std::memory_order_relaxed);
}

// Fills what the service knows of a request: inputs of these names that the body left out.
void Runtime::identify(Slot& slot) noexcept {
  const Plan& plan = loaded_.plan;
  for (std::size_t i = 0; i < plan.inputs.size(); ++i) {
    Tensor& tensor = slot.inputs[i];
    if (tensor.present || tensor.rank != 0) continue;
    if (plan.inputs[i].name == "created" && tensor.dtype == Dtype::i64) {
      tensor.as<std::int64_t>()[0] = std::time(nullptr);
      tensor.present = true;
    } else if (plan.inputs[i].name == "request_id" && tensor.dtype == Dtype::text) {
      tensor.offsets[0] = 0;
      tensor.offsets[1] = std::min(tensor.capacity, static_cast<std::int64_t>(slot.request_id_bytes));
      std::memcpy(tensor.data, slot.request_id.data(), static_cast<std::size_t>(tensor.offsets[1]));
      tensor.present = true;
    }
  }
}

void Runtime::serve_context(Context& context, RequestDecoder& decoder) noexcept {
  if (!loaded_.packages.empty()) torch_shim().prepare_thread();
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stopping_ || admitted_.head >= 0; });
    if (stopping_) return;
    Slot& slot = *slots_[admitted_.head];
    remove(admitted_, admitted_.head);
    slot.state = Slot::State::running;
    ++busy_contexts_;
    const std::int64_t allocated = thread_allocations();
    lock.unlock();
    if (slot.endpoint >= 0) decode(slot, decoder);
    if (slot.status.ok()) context.run(slot.inputs, slot.response, {slot.deadline, &slot.cancelled}, slot.status);
    if (slot.trace) slot.trace(context);
    context.release();
    lock.lock();
    --busy_contexts_;
    finish(slot);
    allocations_ += thread_allocations() - allocated;
  }
}

void Runtime::watch_deadlines() noexcept {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const Clock::time_point next = expire(Clock::now());
    if (next == Clock::time_point::max()) {
      timer_.wait(lock);
    } else {
      timer_.wait_until(lock, next);
    }
  }
}

void Runtime::expire_one(Slot& slot, Code code, const char* message) noexcept {
  remove(slot.permit ? admitted_ : waiting_, index_of(slot));
  slot.status.fail(code, "%s", message);
  finish(slot);
}

// Ends every request whose time is over before it started; returns when to look again.
Clock::time_point Runtime::expire(Clock::time_point now) noexcept {
  Clock::time_point next = Clock::time_point::max();
  for (int index = waiting_.head, after = -1; index >= 0; index = after) {
    Slot& slot = *slots_[index];
    after = slot.next;
    if (slot.patience > now) {
      next = std::min(next, slot.patience);
    } else if (slot.deadline <= now) {
      expire_one(slot, Code::deadline_exceeded, "the deadline passed while the request waited for a permit");
    } else {
      expire_one(slot, Code::overloaded, "no permit came free within max_wait_ms; try again later");
    }
  }
  for (int index = admitted_.head, after = -1; index >= 0; index = after) {
    Slot& slot = *slots_[index];
    after = slot.next;
    if (slot.deadline > now) {
      next = std::min(next, slot.deadline);
    } else {
      expire_one(slot, Code::deadline_exceeded, "the deadline passed while the request waited for a context");
    }
  }
  return next;
}

Stats Runtime::stats() const noexcept {
  std::lock_guard lock(mutex_);
  Stats stats;
  stats.counters = counters_;
  stats.in_flight = {loaded_.plan.in_flight, permits_, waiting_places_};
  stats.allocations_between_nodes = allocations_;
  for (const auto& node : loaded_.nodes) stats.allocations_between_nodes -= node->allocations.load();
  stats.decoded = decoded_.load(std::memory_order_relaxed);
  stats.decode_nanoseconds = decode_nanoseconds_.load(std::memory_order_relaxed);
  stats.contexts = {loaded_.plan.contexts, busy_contexts_, admitted_.size};
  for (const auto& package : loaded_.packages)
    stats.runners.push_back({package->pool().capacity(), package->pool().used(), package->pool().waiting()});
  return stats;
}

void Runtime::replace_node(std::string_view name, const std::string& options) {
  const auto found =
      std::ranges::find(loaded_.nodes, name, [](const auto& node) -> std::string_view { return node->spec->name; });
  if (found == loaded_.nodes.end() || (*found)->spec->aoti)
    throw std::invalid_argument("no cpu node is called " + std::string(name));
  NodeConfig config = (*found)->spec->config;
  config.options = options;
  std::shared_ptr<const LoadedCpuNode> node = load_cpu_node(*(*found)->spec, config);
  std::lock_guard lock(loaded_.replacing);
  if (node->workspace_bytes() > (*found)->cpu->workspace_bytes())
    throw std::invalid_argument("node " + std::string(name) + " needs more workspace than contexts have for it");
  std::swap((*found)->cpu, node);  // the old one goes after the lock, or with the last request that uses it
}

bool Runtime::drain(double timeout_s) noexcept {
  std::unique_lock lock(mutex_);
  draining_ = true;
  return idle_.wait_until(lock, after(timeout_s), [&] { return unfinished_ == 0; });
}

}  // namespace dagserve
