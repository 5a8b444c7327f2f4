using System;

namespace Tidemill
{
    /// <summary>
    /// A <see cref="World"/> for jobs: a struct without references, which IJobParallelFor and Burst take as a field. Its requests may be made from any number of
    /// threads at once, and its actions be read so, between two exchanges. It holds as long as the world does. Nothing here throws: what a job got wrong is
    /// an error of the next <see cref="Bridge.Exchange"/>, which names it.
    /// </summary>
    public readonly unsafe struct JobWorld
    {
        private readonly long store; // an address; a pointer would need an attribute of Unity's in its jobs

        internal JobWorld(Store* store)
        {
            this.store = (long)store;
        }

        /// <summary>Ask for an action of this agent; see <see cref="World.RequestDecision"/>.</summary>
        public JobRequest RequestDecision(int agentId)
        {
            return Take(0, agentId, 0);
        }

        /// <summary>The agent's episode has ended; see <see cref="World.EndEpisode"/>.</summary>
        public JobRequest EndEpisode(int agentId)
        {
            return Take(1, agentId, 0);
        }

        /// <summary>The agent's episode was broken off; see <see cref="World.InterruptEpisode"/>.</summary>
        public JobRequest InterruptEpisode(int agentId)
        {
            return Take(1, agentId, 1);
        }

        /// <summary>How many actions the last exchange brought.</summary>
        public int ActionCount { get { return ((Store*)store)->Acting; } }

        /// <summary>The action of a row from 0 to <see cref="ActionCount"/> - 1.</summary>
        public JobAction Action(int row)
        {
            return new JobAction((Store*)store, row);
        }

        private JobRequest Take(int ended, int agentId, byte interrupted)
        {
            var target = (Store*)store;
            int row = Store.Take(target, ended != 0 ? &target->Ends : &target->Decisions, agentId, interrupted);
            if (row < 0)
            {
                Store.Note(target, Fault.Full, agentId, ended);
            }
            return new JobRequest(target, ended, row);
        }
    }

    /// <summary>What an agent tells with a request of a <see cref="JobWorld"/>; it can be set until the next exchange. All calls return the request.</summary>
    public readonly unsafe struct JobRequest
    {
        private readonly long store;
        private readonly int ended;
        private readonly int row; // -1: there was no room
        private readonly int exchange;

        internal JobRequest(Store* store, int ended, int row)
        {
            this.store = (long)store;
            this.ended = ended;
            this.row = row;
            exchange = store->Exchange;
        }

        /// <summary>What the agent earned since its last request.</summary>
        public JobRequest SetReward(float reward)
        {
            Table* table = Open();
            if (table != null)
            {
                table->Rewards[row] = reward;
            }
            return this;
        }

        /// <summary>Observation `k` of one value.</summary>
        public JobRequest SetObservation(int k, float x)
        {
            return SetObservation(k, &x, 1);
        }

        /// <summary>Observation `k` of two values.</summary>
        public JobRequest SetObservation(int k, float x, float y)
        {
            float* values = stackalloc float[2];
            values[0] = x;
            values[1] = y;
            return SetObservation(k, values, 2);
        }

        /// <summary>Observation `k` of three values.</summary>
        public JobRequest SetObservation(int k, float x, float y, float z)
        {
            float* values = stackalloc float[3];
            values[0] = x;
            values[1] = y;
            values[2] = z;
            return SetObservation(k, values, 3);
        }

        /// <summary>Observation `k` of four values.</summary>
        public JobRequest SetObservation(int k, float x, float y, float z, float w)
        {
            float* values = stackalloc float[4];
            values[0] = x;
            values[1] = y;
            values[2] = z;
            values[3] = w;
            return SetObservation(k, values, 4);
        }

        /// <summary>Observation `k` from memory that does not move (an engine's native array), as many values as its shape has, in C order.</summary>
        public JobRequest SetObservation(int k, float* values, int count)
        {
            Table* table = Open();
            if (table == null)
            {
                return this;
            }
            var target = (Store*)store;
            if (k < 0 || k >= target->ObservationCount)
            {
                Store.Note(target, Fault.NoObservation, table->Ids[row], k);
            }
            else if (count != target->ObservationSizes[k])
            {
                Store.Note(target, Fault.WrongSize, table->Ids[row], k);
            }
            else
            {
                float* to = Store.Observation(target, table, row, k);
                for (int i = 0; i < count; i++)
                {
                    to[i] = values[i];
                }
            }
            return this;
        }

        /// <summary>The same for those who write no unsafe code.</summary>
        public JobRequest SetObservation(int k, IntPtr values, int count)
        {
            return SetObservation(k, (float*)values, count);
        }

        /// <summary>Forbid (or allow again) one action of a branch.</summary>
        public JobRequest SetActionMask(int branch, int action, bool forbidden)
        {
            Table* table = Open();
            if (table == null)
            {
                return this;
            }
            var target = (Store*)store;
            if (ended != 0)
            {
                Store.Note(target, Fault.MaskOfEnded, table->Ids[row], branch);
            }
            else if (branch < 0 || branch >= target->BranchCount || action < 0 || action >= target->BranchStarts[branch + 1] - target->BranchStarts[branch])
            {
                Store.Note(target, Fault.NoChoice, table->Ids[row], branch);
            }
            else
            {
                table->Masks[(long)row * target->MaskSize + target->BranchStarts[branch] + action] = forbidden ? (byte)1 : (byte)0;
            }
            return this;
        }

        /// <summary>The rows, where this may still be set.</summary>
        private Table* Open()
        {
            var target = (Store*)store;
            if (target == null || row < 0)
            {
                return null;
            }
            Table* table = ended != 0 ? &target->Ends : &target->Decisions;
            if (exchange != target->Exchange)
            {
                Store.Note(target, Fault.Stale, row, 0);
                return null;
            }
            return table;
        }
    }

    /// <summary>The action that an agent's request was answered by; it can be read until the next exchange.</summary>
    public readonly unsafe struct JobAction
    {
        private readonly long store;
        private readonly int row;

        internal JobAction(Store* store, int row)
        {
            this.store = (long)store;
            this.row = row;
        }

        public int AgentId { get { return Holds(0, 1) ? ((Store*)store)->ActingIds[row] : -1; } }

        /// <summary>Continuous action `index`.</summary>
        public float Continuous(int index)
        {
            var from = (Store*)store;
            return Holds(index, from->ContinuousSize) ? from->Continuous[(long)row * from->ContinuousSize + index] : 0;
        }

        /// <summary>The number of the action chosen in a branch.</summary>
        public int Discrete(int branch)
        {
            var from = (Store*)store;
            return Holds(branch, from->BranchCount) ? from->Discrete[(long)row * from->BranchCount + branch] : 0;
        }

        private bool Holds(int index, int count)
        {
            var from = (Store*)store;
            if (row >= 0 && row < from->Acting && index >= 0 && index < count)
            {
                return true;
            }
            Store.Note(from, Fault.NoAction, row, index);
            return false;
        }
    }
}
